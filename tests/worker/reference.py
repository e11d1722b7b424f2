"""Facts about the demo model from an independent engine, and distances to them.

`tests/data/smollm2.npz` holds one English text of T tokens and, for each position, the 64 highest logits
and the log-sum-exp of all, computed with the file's weights dequantized to f32, f32 activations and f32 KV;
`smollm2.json` greedy continuations of one chat prompt and how far that engine's own quantized kernels are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DATA = Path(__file__).parent.parent / "data"


class Reference(NamedTuple):
    """tokens (T,) i32; top_ids, top_logits (T, 64) descending; logsumexp (T,) f64; nll (T-1,) f64."""

    tokens: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray
    logsumexp: np.ndarray
    next_token_nll: np.ndarray


class Distance(NamedTuple):
    """Natural logarithms, over the positions of the text."""

    mean_kl: float
    max_kl: float
    mean_nll: float
    reference_nll: float


def load() -> Reference:
    with np.load(DATA / "smollm2.npz") as arrays:
        return Reference(*(arrays[name] for name in Reference._fields))


def facts() -> dict[str, Any]:
    return json.loads((DATA / "smollm2.json").read_text())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def divergence(p_log: np.ndarray, q_log: np.ndarray) -> np.ndarray:
    """KL(p || q) of a partition: some events by name, what is left of both as one event more.

    A lower bound of the divergence over all events; with 64 of them within a few percent of it.
    """
    p, q = np.exp(p_log), np.exp(q_log)
    p_rest, q_rest = 1 - p.sum(axis=-1), 1 - q.sum(axis=-1)
    return (p * (p_log - q_log)).sum(axis=-1) + p_rest * np.log(p_rest / q_rest)


def distance(logits: np.ndarray, reference: Reference) -> Distance:
    """Of logits (n, vocab) at the first n positions of the text."""
    n = len(logits)
    q_log = log_softmax(logits)
    p_log = reference.top_logits[:n].astype(np.float64) - reference.logsumexp[:n, None]
    kl = divergence(p_log, np.take_along_axis(q_log, reference.top_ids[:n], axis=1))
    following = reference.tokens[1 : n + 1]
    nll = -q_log[np.arange(len(following)), following]
    reference_nll = reference.next_token_nll[: len(nll)]
    return Distance(float(kl.mean()), float(kl.max()), float(nll.mean()), float(reference_nll.mean()))
