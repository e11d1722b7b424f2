"""A row of the steps arena for the sampler kernel alone, and the call of the kernel."""

from __future__ import annotations

import numpy as np

from shm import step_ring
from shm.sampler_steps import SAMPLER_STEPS
from stages.worker.kernels import sampler
from stages.worker.kernels.buffer_sizes import sampler_bytes
from tools.reference import sampling as reference

MAX_TOKENS = 200  # of a sequence


class Row:
    """A row of the steps arena, and the kernel's scratch."""

    def __init__(self, p: reference.Parameters) -> None:
        self.ints = np.zeros(step_ring.ROW_INTS, np.int64)
        self.floats = np.zeros(step_ring.ROW_FLOATS, np.float32)
        self.mask = np.zeros(step_ring.MAX_MASK, np.int32)
        self.bias_ids = np.zeros(step_ring.MAX_BIAS, np.int32)
        self.bias = np.zeros(step_ring.MAX_BIAS, np.float32)
        self.ints[step_ring.SEED] = np.array(p.seed, np.uint64).astype(np.int64)
        for column, value in (
            (step_ring.CHOICE, p.choice),
            (step_ring.TOP_K, p.top_k),
            (step_ring.MIN_TOKENS, p.min_tokens),
            (step_ring.IGNORE_EOS, p.ignore_eos),
            (step_ring.N_BIAS, len(p.bias)),
            (step_ring.N_MASK, len(p.mask_ids)),
            (step_ring.DRY_ALLOWED, p.dry_allowed_length),
            (step_ring.DRY_LAST_N, p.dry_penalty_last_n),
            (step_ring.HAS_BREAKERS, bool(p.breakers)),
            (step_ring.ORDER, sum(SAMPLER_STEPS[s] << (4 * i) for i, s in enumerate(p.order))),
        ):
            self.ints[column] = value
        for column, number in (
            (step_ring.TEMPERATURE, p.temperature),
            (step_ring.TOP_P, p.top_p),
            (step_ring.REPETITION, p.repetition),
            (step_ring.FREQUENCY, p.frequency),
            (step_ring.PRESENCE, p.presence),
            (step_ring.MIN_P, p.min_p),
            (step_ring.TYPICAL_P, p.typical_p),
            (step_ring.TOP_N_SIGMA, p.top_n_sigma),
            (step_ring.DRY_MULTIPLIER, p.dry_multiplier),
            (step_ring.DRY_BASE, p.dry_base),
            (step_ring.XTC_PROBABILITY, p.xtc_probability),
            (step_ring.XTC_THRESHOLD, p.xtc_threshold),
        ):
            self.floats[column] = number
        self.mask[: len(p.mask_ids)] = p.mask_ids
        for i, (token, bias) in enumerate(p.bias):
            self.bias_ids[i], self.bias[i] = token, bias


class Sampler:
    def __init__(self, vocab: int) -> None:
        self.scratch = np.zeros(sampler_bytes(vocab, MAX_TOKENS), np.uint8)

    def __call__(
        self,
        logits: np.ndarray,
        tokens: np.ndarray,
        start: int,
        p: reference.Parameters,
        allowed: np.ndarray | None = None,
    ) -> int:
        row = Row(p)
        before = logits.copy()
        arrays = [a.ctypes.data for a in (row.ints, row.floats, row.mask, row.bias_ids, row.bias)]
        bits = np.zeros(step_ring.mask_words(len(logits)), np.uint32)
        if allowed is not None:
            packed = np.packbits(allowed, bitorder="little")
            bits.view(np.uint8)[: len(packed)] = packed
        mask = 0 if allowed is None else bits.ctypes.data
        breakers = np.zeros(step_ring.mask_words(len(logits)), np.uint32)
        for token in p.breakers:
            breakers[token // 32] |= np.uint32(1 << token % 32)
        scratch = self.scratch.ctypes.data
        token = sampler.sample(
            logits.ctypes.data,
            len(logits),
            tokens.ctypes.data,
            len(tokens),
            start,
            *arrays,
            mask,
            breakers.ctypes.data,
            scratch,
        )
        assert logits.tobytes() == before.tobytes()
        return token


def logits_of(rng: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    if kind == "ties":
        return rng.integers(-4, 5, vocab).astype(np.float32)
    if kind == "flat":
        return (rng.standard_normal(vocab) * 0.1).astype(np.float32)
    if kind == "equal":
        return np.full(vocab, 1.5, np.float32)
    if kind in ("close", "outlier"):
        values = (1 + rng.standard_normal(vocab) * 1e-4).astype(np.float32)
        values[0] += 5 * (kind == "outlier")
        return values
    return (rng.standard_normal(vocab) * 5).astype(np.float32)
