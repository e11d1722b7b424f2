"""Distances of two engines from exact weights: KL divergence of the next token over a text."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.real_models.nearness import noise
from tools.reference.float_forward import FloatModel
from tools.reference.peer_model import PeerModel
from tools.step_runner import StepRunner

CHUNK = 64  # positions of a step
_ROWS = 32  # of logits at once: in f64, some hundred MB for the largest vocabularies


class Distances(NamedTuple):
    """Mean KL from exact weights, nats; `noise`: of the peer's margins (nearness.py)."""

    positions: int
    ours: float
    theirs: float
    noise: float

    @property
    def ratio(self) -> float:
        """Our distance divided by the peer's."""
        return self.ours / self.theirs


def mean_kl(exact: np.ndarray, found: np.ndarray) -> float:
    """Mean over positions of KL(exact || found), nats, from logits (positions, vocab)."""
    total = 0.0
    for at in range(0, len(exact), _ROWS):
        p, q = (_log_softmax(logits[at : at + _ROWS]) for logits in (exact, found))
        total += float((np.exp(p) * (p - q)).sum())
    return total / len(exact)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def own_logits(index_path: Path, tokens: Sequence[int]) -> np.ndarray:
    """Logits of every position, by the kernels that the server runs: (len(tokens), vocab) f32.

    With one rank: the number of ranks does not change a bit, and threads that wait for each other are slow beside
    other work.
    """
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        StepRunner(
            index_path,
            Path(directory),
            max_rows=1,
            max_tokens=len(tokens) + 1,
            step_tokens=CHUNK,
            max_samples=CHUNK,
        ) as runner,
    ):
        runner.write_row(0, tokens)
        return np.array(runner.prefill(0, len(tokens), CHUNK, samples_each=True))


def distances(index_path: Path, tokens: Sequence[int], exact: FloatModel, peer: PeerModel) -> Distances:
    """Of both engines on the same file, over the positions of `tokens`."""
    reference, theirs = exact.logits(tokens), peer.logits(tokens)
    ours, other = mean_kl(reference, own_logits(index_path, tokens)), mean_kl(reference, theirs)
    return Distances(len(tokens), ours, other, noise(reference, theirs))
