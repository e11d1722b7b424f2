"""DRY ("don't repeat yourself"): lowers the candidates that would continue a repetition of the text's last tokens.

Equals the reference implementation (tools/reference/sampling_filters.py).  The time grows with the length of the text,
not of the vocabulary.  The scratch is drawn in sampler_vocabulary.py.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_vocabulary import padded, repeat_at
from stages.worker.kernels.simd import get_f32, get_i32, put_f32, put_i32

_F = np.float32
_V_MAX = 3.0e38


@numba.njit(**INNER)
def _tokens_after_breaker(last, n, breakers, vocab):
    """How many of the last n tokens follow the last sequence breaker; `last`: address of the last token."""
    if breakers != 0:
        for i in range(n):
            token = get_i32(last - 4 * i)
            if 0 <= token < vocab and (get_i32(breakers + token // 32 * 4) >> (token % 32)) & 1:
                return i
    return n


@numba.njit(**INNER)
def _write_repeats(last, n, repeats):
    """repeats[k], 0 < k < n: how many of the last tokens equal those k tokens earlier, counted backwards.

    The Z function of the reversed text: linear, as [left, right) is the match that reaches farthest.
    """
    left = right = 0
    for k in range(1, n):
        length = 0
        if k < right:
            length = min(get_i32(repeats + 4 * (k - left)), right - k)
        if k + length >= right:
            while k + length < n and get_i32(last - 4 * length) == get_i32(last - 4 * (k + length)):
                length += 1
            left, right = k, k + length
        put_i32(repeats + 4 * k, length)


@numba.njit(**INNER)
def _penalty(multiplier, base, exponent):
    """multiplier * base ** exponent, by squaring in f64, at most 3e38."""
    result, square = 1.0, np.float64(base)
    while exponent > 0:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return _F(min(np.float64(multiplier) * result, _V_MAX))


@numba.njit(**INNER)
def dry(scratch, vocab, n, whole, tokens, n_tokens, last_n, breakers, multiplier, base, allowed):
    """Lower the candidates. Returns whether any value may have changed. `last_n`: tokens considered, -1 for all."""
    total = n_tokens if last_n < 0 else min(n_tokens, last_n)
    if total <= allowed:
        return False
    last = tokens + 4 * (n_tokens - 1)
    limit = _tokens_after_breaker(last, total, breakers, vocab)
    if limit < allowed:
        return False
    size, repeats = 4 * padded(vocab), repeat_at(scratch, vocab)
    longest, values, ids = scratch + 2 * size, scratch + 3 * size, scratch + 4 * size
    _write_repeats(last, total, repeats)
    changed = False
    for k in range(1, total):
        length = min(get_i32(repeats + 4 * k), limit)
        token = get_i32(last - 4 * (k - 1))
        if length < allowed or not 0 <= token < vocab:
            continue
        if breakers != 0 and (get_i32(breakers + token // 32 * 4) >> (token % 32)) & 1:
            continue
        put_i32(longest + 4 * token, max(get_i32(longest + 4 * token), length + 1))
        changed = True
    if not changed:
        return False
    if not whole:
        for i in range(n):
            length = get_i32(longest + 4 * get_i32(ids + 4 * i))
            if length:
                put_f32(values + 4 * i, get_f32(values + 4 * i) - _penalty(multiplier, base, length - 1 - allowed))
    for k in range(1, total):
        token = get_i32(last - 4 * (k - 1))
        if not 0 <= token < vocab:
            continue
        length = get_i32(longest + 4 * token)
        if length:
            put_i32(longest + 4 * token, 0)
            if whole:
                at = scratch + 4 * token
                put_f32(at, get_f32(at) - _penalty(multiplier, base, length - 1 - allowed))
    return True
