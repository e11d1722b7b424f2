"""The sampler in NumPy and plain Python, as docs/numerics.md defines it; `stages/worker/kernels/sampler.py` equals it.

Written to be read: every sum is a loop in the order that the page defines.  Independent of arenas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shm.sampler_steps import DEFAULT_ORDER
from tools.reference import sampling_filters
from tools.reference.arithmetic import exp
from tools.reference.candidates import SUM_BLOCK, Candidates, block_sums, log, running

V_MAX = np.float32(3.0e38)
_F = np.float32


@dataclass
class Parameters:
    """Sampling parameters of one sequence, as a row of the steps arena holds them; the defaults have no effect."""

    seed: int = 0
    choice: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    mask_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    breakers: tuple[int, ...] = ()  # ids of tokens that have a sequence breaker
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    order: tuple[str, ...] = DEFAULT_ORDER


def philox(seed: int, position: int, choice: int, stream: int = 0) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    c = [position & 0xFFFFFFFF, choice & 0xFFFFFFFF, stream, 0]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0], c[1], c[2], c[3]


def uniform(seed: int, position: int, choice: int, stream: int = 0) -> float:
    """In [0, 1), 53 bits. `stream`: 0 for the draw, 1 for XTC."""
    x0, x1, _, _ = philox(seed, position, choice, stream)
    return ((x0 << 21) + (x1 >> 11)) * 2.0**-53


def _forbid(c: Candidates, p: Parameters, position: int, allowed: np.ndarray | None) -> None:
    """Of the whole vocabulary."""
    is_over = allowed is not None and set(np.flatnonzero(allowed).tolist()) <= set(p.mask_ids)
    if allowed is not None:
        c.values[~allowed] = -np.inf
    if (p.ignore_eos or position < p.min_tokens) and not is_over:
        c.values[[token for token in p.mask_ids if 0 <= token < len(c.values)]] = -np.inf


def _bias(c: Candidates, p: Parameters) -> None:
    where = {int(i): at for at, i in enumerate(c.ids)}
    for token, bias in p.bias:
        if token in where:
            c.values[where[token]] += _F(bias)


def _temper(c: Candidates, t: np.float32) -> None:
    top = c.values.max()
    if top > -np.inf and abs(top / t) > V_MAX:
        limit = min(top, V_MAX)
        c.values = np.minimum(c.values, limit) - limit
    c.values = c.values / t


def _repetition(c: Candidates, p: Parameters, history: np.ndarray) -> None:
    if p.repetition == 1.0:
        return
    seen = np.isin(c.ids, history)
    v = c.values[seen]
    c.values[seen] = np.where(v > 0, v / _F(p.repetition), v * _F(p.repetition))


def _penalties(c: Candidates, p: Parameters, output: np.ndarray) -> None:
    if p.frequency == 0.0 and p.presence == 0.0:
        return
    counts = np.array([np.count_nonzero(output == i) for i in c.ids] if len(output) else [0] * len(c.ids))
    counts = counts.astype(np.float32)
    seen = counts > 0
    c.values[seen] = (c.values[seen] - _F(p.frequency) * counts[seen]) - _F(p.presence)


def _top_p(c: Candidates, p: Parameters) -> None:
    if p.top_p >= 1.0:
        return
    total = running(block_sums(c.weights()) if c.whole else list(c.weights()))
    c.sort()
    enough, sum_, n = float(_F(p.top_p)) * total, 0.0, 0
    for weight in c.weights():
        sum_ += weight
        n += 1
        if sum_ >= enough:
            break
    c.keep(n)


def _wants_xtc(p: Parameters, position: int) -> bool:
    if p.temperature <= 0 or p.xtc_probability <= 0 or p.xtc_threshold > 0.5:
        return False
    return uniform(p.seed, position, p.choice, stream=1) < float(_F(p.xtc_probability))


@np.errstate(over="ignore")  # f32 overflows to an infinity, as in the kernel
def sample(
    logits: np.ndarray, tokens: np.ndarray, output_start: int, p: Parameters, allowed: np.ndarray | None = None
) -> int:
    """The id drawn after `tokens` (prompt, then output from `output_start` on), or -1: logits not finite.

    `allowed`: the token mask, a bool for each id; None: all.
    """
    if not np.isfinite(logits).all():
        return -1
    position = len(tokens) - output_start
    c = Candidates(np.arange(len(logits), dtype=np.int32), logits.astype(np.float32).copy())
    _forbid(c, p, position, allowed)
    for step in p.order:
        if step == "mask":
            _bias(c, p)
        elif step == "repetition":
            _repetition(c, p, tokens)
        elif step == "temperature" and p.temperature > 0:
            _temper(c, _F(p.temperature))
        elif step == "top_k" and 0 < p.top_k < len(c.ids):
            c.sort()
            c.keep(p.top_k)
        elif step == "top_p":
            _top_p(c, p)
        elif step == "penalties":
            _penalties(c, p, tokens[output_start:])
        elif step == "dry" and p.dry_multiplier != 0:
            sampling_filters.dry(
                c,
                tokens.tolist(),
                p.dry_penalty_last_n,
                set(p.breakers),
                p.dry_multiplier,
                p.dry_base,
                p.dry_allowed_length,
            )
        elif step == "top_n_sigma" and p.top_n_sigma > 0:
            sampling_filters.top_n_sigma(c, p.top_n_sigma)
        elif step == "typical_p" and 0 < p.typical_p < 1:
            sampling_filters.typical_p(c, p.typical_p)
        elif step == "min_p" and p.min_p > 0:
            sampling_filters.min_p(c, p.min_p)
        elif step == "xtc" and _wants_xtc(p, position):
            sampling_filters.xtc(c, p.xtc_threshold)
        if not c.whole:
            c.sort()
    if p.temperature <= 0 or c.values.max() == -np.inf:
        c.sort()
        return int(c.ids[0])
    return _draw(c, uniform(p.seed, position, p.choice))


def _draw(c: Candidates, u: float) -> int:
    weights = c.weights()
    first, sum_ = 0, 0.0
    if c.whole:
        sums = block_sums(weights)
        threshold = u * running(sums)
        block = 0
        while block < len(sums) - 1 and sum_ + sums[block] <= threshold:
            sum_ += sums[block]
            block += 1
        first = block * SUM_BLOCK
        weights = weights[: first + SUM_BLOCK]
    else:
        threshold = u * running(list(weights))
    last = first
    for i in range(first, len(weights)):
        if weights[i] > 0:
            last = i
        sum_ += weights[i]
        if sum_ > threshold:
            return int(c.ids[i])
    return int(c.ids[last])


def logprobs(logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All log probabilities (f32), the n best ids and theirs, of the raw distribution."""
    top = logits.max()
    total = running(block_sums(exp(logits - top).astype(np.float64)))
    norm = float(top) + log(total)
    values = (logits.astype(np.float64) - norm).astype(np.float32)
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))[:n]
    return values, order.astype(np.int32), values[order]
