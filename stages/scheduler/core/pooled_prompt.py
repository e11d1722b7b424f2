"""The pooled hidden states of a prompt, which a sequence collects step by step instead of generating tokens.

The worker sums up fixed-point numbers (shm/step_ring.py), so the vector depends on the prompt alone.  A sequence that
is preempted starts again; steps that are void have added nothing.
"""

from __future__ import annotations

import numpy as np

from shm.step_ring import POOL_SCALE

SALT = "\0\0pooled"  # of no client: pages of prompts that are only pooled are not shared, nor cached for others


class PooledPrompt:
    """`kind`: one of POOLINGS; `n_tokens`: of the prompt."""

    __slots__ = ("_n", "_sum", "is_whole", "kind", "n_tokens")

    def __init__(self, kind: str, n_tokens: int) -> None:
        self.kind = kind
        self.n_tokens = n_tokens
        self.is_whole = False  # all positions are computed in one step: they attend to those behind them
        self._sum: np.ndarray | None = None
        self._n = 0  # positions in it

    def reset(self) -> None:
        """Nothing is computed: the sequence was preempted."""
        self._sum, self._n = None, 0

    def part(self, start: int, count: int) -> tuple[int, int]:
        """Of the positions start .. start + count - 1: the first one to pool, from `start`, and how many; 0: none."""
        if self.kind == "mean":
            return 0, count
        if self.kind in ("cls", "rank"):
            return 0, int(start == 0)
        is_last = start + count == self.n_tokens
        return (count - 1, 1) if is_last else (0, 0)

    def add(self, sums: np.ndarray, n: int) -> None:
        """Add a step's sums (width,) i64 of n positions."""
        self._sum = sums.copy() if self._sum is None else self._sum + sums
        self._n += n

    def vector(self) -> bytes | None:
        """The mean of the pooled positions, f32 little-endian; None if not all of them, and no others, were added."""
        n = self.n_tokens if self.kind == "mean" else 1
        if self._sum is None or self._n != n:
            return None
        return (self._sum.astype(np.float64) / (n * 2.0**POOL_SCALE)).astype("<f4").tobytes()
