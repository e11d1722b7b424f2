"""What the steps of the reference sampler share: the candidates, the order of sums, and the logarithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp

import numpy as np

from tools.reference.arithmetic import LANES, exp, reduce_lanes

SUM_BLOCK = 1024  # ids in a block of a sum over the whole vocabulary
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = 12


@dataclass
class Candidates:
    """Ids and f32 values. `whole`: the vocabulary by ascending id; else by (value desc, id asc)."""

    ids: np.ndarray
    values: np.ndarray
    whole: bool = True
    logits: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    def sort(self) -> None:
        """Order by value, descending, then by id."""
        order = np.lexsort((self.ids, -self.values.astype(np.float64)))
        self.ids, self.values, self.whole = self.ids[order], self.values[order], False

    def keep(self, n: int) -> None:
        """Drop all but the first `n`."""
        self.ids, self.values = self.ids[:n], self.values[:n]

    def weights(self) -> np.ndarray:
        """f64(exp(v - v_max)); zeros where everything is -inf."""
        top = self.values.max()
        if top == -np.inf:
            return np.zeros(len(self.values))
        return exp(self.values - top).astype(np.float64)


def block_sums(weights: np.ndarray) -> list[float]:
    """f64 sums of blocks of `SUM_BLOCK`, each over 16 lanes."""
    sums = []
    for start in range(0, len(weights), SUM_BLOCK):
        block = weights[start : start + SUM_BLOCK]
        padded = np.zeros(-(-len(block) // LANES) * LANES)
        padded[: len(block)] = block
        lanes = np.zeros(LANES)
        for row in padded.reshape(-1, LANES):
            lanes = lanes + row
        sums.append(float(reduce_lanes(lanes)))
    return sums


def running(values: list[float]) -> float:
    """Sum in order, in f64."""
    total = 0.0
    for value in values:
        total += value
    return total


def log(x: float) -> float:
    """The project's own logarithm of a positive f64: 2 atanh((m - 1) / (m + 1)) + k ln 2."""
    m, k = frexp(x)
    if m < _SQRT_HALF:
        m, k = m * 2.0, k - 1
    z = (m - 1.0) / (m + 1.0)
    square = z * z
    p = 1.0 / (2 * _LOG_TERMS - 1)
    for i in range(_LOG_TERMS - 2, -1, -1):
        p = p * square + 1.0 / (2 * i + 1)
    return k * _LN2 + 2.0 * z * p
