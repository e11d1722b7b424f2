"""The sampler: one token from one row of logits, by docs/numerics.md.

Equals the reference implementation (tools/reference/sampling.py).  Sampler state is derived from the row's tokens each
time, so that a step can be repeated.  Scratch: sampler_vocabulary.py.
"""

from __future__ import annotations

import numba
import numpy as np

from shm import step_ring
from shm.sampler_steps import SAMPLER_STEPS
from stages.worker.kernels.buffer_sizes import DIGIT, SUM_BLOCK
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_candidates import prefix_length, sort_list, top_k, weigh_list
from stages.worker.kernels.sampler_cut import (
    CUT,
    SORTED,
    draw_of_cut,
    drop_others,
    is_weighed,
    leave,
    list_of_cut,
    min_p_of_cut,
    stays_finite,
    top_k_of_cut,
    top_k_of_many,
    top_p_of_cut,
    weigh_cut,
    xtc_of_cut,
)
from stages.worker.kernels.sampler_dry import dry
from stages.worker.kernels.sampler_filters import min_p, top_n_sigma, xtc
from stages.worker.kernels.sampler_nucleus import top_p
from stages.worker.kernels.sampler_scalars import log, uniform
from stages.worker.kernels.sampler_typical import UNCHANGED, typical_p
from stages.worker.kernels.sampler_vocabulary import (
    first_largest,
    is_finite,
    largest,
    padded,
    rank_of,
    weigh_vocabulary,
)
from stages.worker.kernels.simd import (
    JIT,
    LANES,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    load_f32,
    load_f32_part,
    minimum,
    put_f32,
    put_i32,
    splat_f32,
    store_f32,
)

NOT_FINITE = -1
MASK, REPEAT, TEMPER, CUT_K, CUT_P, PENALIZE = (
    SAMPLER_STEPS[name] for name in ("mask", "repetition", "temperature", "top_k", "top_p", "penalties")
)
DRY, SIGMA, TYPICAL, CUT_MIN_P, XTC = (
    SAMPLER_STEPS[name] for name in ("dry", "top_n_sigma", "typical_p", "min_p", "xtc")
)
DRAW_STREAM, XTC_STREAM = 0, 1  # of random numbers
_V_MAX = 3.0e38
_F = np.float32
_SEED, _CHOICE, _TOP_K = 8 * step_ring.SEED, 8 * step_ring.CHOICE, 8 * step_ring.TOP_K
_MIN_TOKENS, _IGNORE_EOS = 8 * step_ring.MIN_TOKENS, 8 * step_ring.IGNORE_EOS
_N_BIAS, _N_MASK, _ORDER = 8 * step_ring.N_BIAS, 8 * step_ring.N_MASK, 8 * step_ring.ORDER
_MAX_BIAS, _MAX_MASK, _MAX_TOP = step_ring.MAX_BIAS, step_ring.MAX_MASK, step_ring.MAX_TOP
_LOGPROBS = 8 * step_ring.LOGPROBS
_TEMPERATURE, _TOP_P, _REPETITION = 4 * step_ring.TEMPERATURE, 4 * step_ring.TOP_P, 4 * step_ring.REPETITION
_FREQUENCY, _PRESENCE = 4 * step_ring.FREQUENCY, 4 * step_ring.PRESENCE
_MIN_P, _TYPICAL_P, _TOP_N_SIGMA = 4 * step_ring.MIN_P, 4 * step_ring.TYPICAL_P, 4 * step_ring.TOP_N_SIGMA
_DRY_MULTIPLIER, _DRY_BASE = 4 * step_ring.DRY_MULTIPLIER, 4 * step_ring.DRY_BASE
_DRY_ALLOWED, _DRY_LAST_N = 8 * step_ring.DRY_ALLOWED, 8 * step_ring.DRY_LAST_N
_HAS_BREAKERS = 8 * step_ring.HAS_BREAKERS
_SCORED = 8 * step_ring.SCORED
_XTC_PROBABILITY, _XTC_THRESHOLD = 4 * step_ring.XTC_PROBABILITY, 4 * step_ring.XTC_THRESHOLD


# ------------------------------------------------------------------ steps that change values


@numba.njit(**INNER)
def _add_to(scratch, vocab, n, whole, identity, value, replace):
    """Add `value` to (or put it at) the candidate `identity`, if it is one."""
    size = 4 * padded(vocab)
    if identity < 0 or identity >= vocab:
        return
    if whole:
        at = scratch + 4 * identity
        put_f32(at, value if replace else get_f32(at) + value)
        return
    for i in range(n):
        if get_i32(scratch + 4 * size + 4 * i) == identity:
            at = scratch + 3 * size + 4 * i
            put_f32(at, value if replace else get_f32(at) + value)
            return


@numba.njit(**INNER)
def _repeat(v, r):
    return v / r if v > _F(0.0) else v * r


@numba.njit(**INNER)
def _repetition(scratch, vocab, n, whole, tokens, n_tokens, r):
    size = 4 * padded(vocab)
    count, values, ids = scratch + 2 * size, scratch + 3 * size, scratch + 4 * size
    for i in range(n_tokens):
        identity = get_i32(tokens + 4 * i)
        if 0 <= identity < vocab and get_i32(count + 4 * identity) == 0:
            put_i32(count + 4 * identity, 1)
            if whole:
                put_f32(scratch + 4 * identity, _repeat(get_f32(scratch + 4 * identity), r))
    if not whole:
        for i in range(n):
            if get_i32(count + 4 * get_i32(ids + 4 * i)):
                put_f32(values + 4 * i, _repeat(get_f32(values + 4 * i), r))
    for i in range(n_tokens):
        identity = get_i32(tokens + 4 * i)
        if 0 <= identity < vocab:
            put_i32(count + 4 * identity, 0)


@numba.njit(**INNER)
def _penalties(scratch, vocab, n, whole, tokens, n_tokens, frequency, presence):
    """`tokens`: the output's."""
    size = 4 * padded(vocab)
    count, values, ids = scratch + 2 * size, scratch + 3 * size, scratch + 4 * size
    for i in range(n_tokens):
        identity = get_i32(tokens + 4 * i)
        if 0 <= identity < vocab:
            put_i32(count + 4 * identity, get_i32(count + 4 * identity) + 1)
    if not whole:
        for i in range(n):
            times = get_i32(count + 4 * get_i32(ids + 4 * i))
            if times:
                put_f32(values + 4 * i, (get_f32(values + 4 * i) - frequency * _F(times)) - presence)
    for i in range(n_tokens):
        identity = get_i32(tokens + 4 * i)
        if 0 <= identity < vocab:
            times = get_i32(count + 4 * identity)
            put_i32(count + 4 * identity, 0)
            if whole and times:
                at = scratch + 4 * identity
                put_f32(at, (get_f32(at) - frequency * _F(times)) - presence)


@numba.njit(**INNER)
def _temper(x, n, t):
    top, divisor = largest(x, n), splat_f32(t)
    limit, shift = splat_f32(_F(np.inf)), splat_f32(_F(0.0))
    # The largest quotient stays finite, so that its candidates can be told from all others.
    if top > _F(-np.inf) and abs(top / t) > _F(_V_MAX):
        limit = shift = splat_f32(min(top, _F(_V_MAX)))
    for i in range(0, n, LANES):
        store_f32(x + 4 * i, (minimum(load_f32(x + 4 * i), limit) - shift) / divisor)


# ------------------------------------------------------------------ drawing


@numba.njit(**INNER)
def _forbid(scratch, vocab, mask):
    """-inf for the ids whose bit in the token mask is 0. Words of the mask are mostly all zeros or all ones."""
    low = splat_f32(_F(-np.inf))
    for start in range(0, vocab, 32):
        word = get_i32(mask + start // 8) & 0xFFFFFFFF
        if word == 0:  # the scratch is padded
            store_f32(scratch + 4 * start, low)
            store_f32(scratch + 4 * start + 64, low)
        elif word != 0xFFFFFFFF:
            for i in range(min(32, vocab - start)):
                if (word >> i) & 1 == 0:
                    put_f32(scratch + 4 * (start + i), _F(-np.inf))


@numba.njit(**INNER)
def _allows(mask, vocab, identity):
    return 0 <= identity < vocab and (get_i32(mask + identity // 32 * 4) >> (identity % 32)) & 1 == 1


@numba.njit(**INNER)
def _allows_only(mask, vocab, ids, n):
    """Whether a token mask allows none but `n` (up to MAX_MASK) distinct ids."""
    listed = 0
    for i in range(n):
        if _allows(mask, vocab, get_i32(ids + 4 * i)):
            listed += 1
    allowed = 0
    for start in range(0, vocab, 32):
        word = get_i32(mask + start // 8) & 0xFFFFFFFF
        while word:
            word &= word - 1
            allowed += 1
            if allowed > listed:
                return False
    return True


@numba.njit(**INNER)
def _draw(scratch, vocab, n, whole, u):
    size = 4 * padded(vocab)
    w, ids = scratch + size, scratch + 4 * size
    total = 0.0
    first, stop = 0, n
    if whole:
        top = largest(scratch, vocab)
        if top == _F(-np.inf):
            return 0
        sums = scratch + 8 * size + 4 * (1 << DIGIT)
        threshold = u * weigh_vocabulary(scratch, w, sums, vocab, top)
        blocks = (vocab + SUM_BLOCK - 1) // SUM_BLOCK
        block = 0
        while block < blocks - 1 and total + get_f64(sums + 8 * block) <= threshold:
            total += get_f64(sums + 8 * block)
            block += 1
        first, stop = block * SUM_BLOCK, min((block + 1) * SUM_BLOCK, vocab)
    else:
        if get_f32(scratch + 3 * size) == _F(-np.inf):
            return get_i32(ids)
        threshold = u * weigh_list(scratch, vocab, n)
    last = first
    for i in range(first, stop):
        weight = get_f32(w + 4 * i)
        if weight > _F(0.0):
            last = i
        total += np.float64(weight)
        if total > threshold:
            return i if whole else get_i32(ids + 4 * i)
    return last if whole else get_i32(ids + 4 * last)


@numba.njit(**INNER)
def _is_plain(ints, floats, position):
    """Whether the order of the raw logits decides the first candidate."""
    return (
        get_i64(ints + _N_BIAS) == 0
        and (
            get_i64(ints + _N_MASK) == 0
            or (get_i64(ints + _IGNORE_EOS) == 0 and position >= get_i64(ints + _MIN_TOKENS))
        )
        and get_f32(floats + _REPETITION) == _F(1.0)
        and get_f32(floats + _FREQUENCY) == _F(0.0)
        and get_f32(floats + _PRESENCE) == _F(0.0)
        and get_f32(floats + _DRY_MULTIPLIER) == _F(0.0)
        and not _F(0.0) < get_f32(floats + _TYPICAL_P) < _F(1.0)
    )


@numba.njit(**INNER)
def _is_active(step, ints, floats, greedy, position):
    """Whether the row's parameters, and for XTC a random number, let `step` change or select anything."""
    if step == MASK:
        return get_i64(ints + _N_BIAS) > 0
    if step == REPEAT:
        return get_f32(floats + _REPETITION) != _F(1.0)
    if step == TEMPER:
        return not greedy and get_f32(floats + _TEMPERATURE) != _F(1.0)
    if step == CUT_K:
        return get_i64(ints + _TOP_K) > 0
    if step == CUT_P:
        return get_f32(floats + _TOP_P) < _F(1.0)
    if step == PENALIZE:
        return get_f32(floats + _FREQUENCY) != _F(0.0) or get_f32(floats + _PRESENCE) != _F(0.0)
    if step == DRY:
        return get_f32(floats + _DRY_MULTIPLIER) != _F(0.0)
    if step == SIGMA:
        return get_f32(floats + _TOP_N_SIGMA) > _F(0.0)
    if step == TYPICAL:
        return _F(0.0) < get_f32(floats + _TYPICAL_P) < _F(1.0)
    if step == CUT_MIN_P:
        return get_f32(floats + _MIN_P) > _F(0.0)
    chance, threshold = get_f32(floats + _XTC_PROBABILITY), get_f32(floats + _XTC_THRESHOLD)
    if step != XTC or greedy or not chance > _F(0.0) or not threshold <= _F(0.5):
        return False
    # As in the draw, a number below the bound is a success: it is certain at 1.
    return uniform(get_i64(ints + _SEED), position, get_i64(ints + _CHOICE), XTC_STREAM) < np.float64(chance)


@numba.njit(**INNER)
def _step_of_cut(scratch, vocab, step, ints, floats, output, n_output):
    """Take `step` of a list that is not made (sampler_cut.py).

    Returns CUT, the length of the list that it makes, or 0: the step is not taken, because only a list can take it.
    """
    t = get_f32(floats + _TEMPERATURE)
    if step == TEMPER and stays_finite(scratch, vocab, 1.0 / np.float64(t), 0.0):
        drop_others(scratch, vocab)
        _temper(scratch, vocab, t)
        return leave(scratch, vocab)
    frequency, presence = get_f32(floats + _FREQUENCY), get_f32(floats + _PRESENCE)
    most = abs(np.float64(frequency)) * n_output + abs(np.float64(presence))
    if step == PENALIZE and stays_finite(scratch, vocab, 1.0, most):
        drop_others(scratch, vocab)
        _penalties(scratch, vocab, vocab, bool(vocab > 0), output, n_output, frequency, presence)
        return leave(scratch, vocab)
    if step == CUT_K:
        return top_k_of_cut(scratch, vocab, get_i64(ints + _TOP_K))
    needs_weights = step == CUT_MIN_P or step == CUT_P or step == XTC
    if not needs_weights or (not is_weighed(scratch, vocab) and weigh_cut(scratch, vocab) != CUT):
        return 0
    if step == CUT_MIN_P:
        min_p_of_cut(scratch, vocab, get_f32(floats + _MIN_P))
        return CUT
    if step == CUT_P:
        return CUT if top_p_of_cut(scratch, vocab, get_f32(floats + _TOP_P)) else 0
    return xtc_of_cut(scratch, vocab, get_f32(floats + _XTC_THRESHOLD))


@numba.njit(**INNER)
def sample(
    logits, vocab, tokens, n_tokens, output_start, ints, floats, mask_ids, bias_ids, bias, mask, breakers, scratch
):
    """The id drawn after n_tokens tokens (i32), or NOT_FINITE.

    logits: vocab f32, not written; ints, floats, mask_ids, bias_ids, bias, breakers: the row's arrays of the steps
    arena (i64, f32, i32, i32, f32, u32); mask: the token mask (u32), 0: none; scratch: as above.
    """
    if not is_finite(logits, vocab):
        return NOT_FINITE
    start = min(max(output_start, 0), n_tokens)
    position = n_tokens - output_start
    t = get_f32(floats + _TEMPERATURE)
    greedy = not t > _F(0.0)
    if greedy and mask == 0 and _is_plain(ints, floats, position):
        return first_largest(logits, vocab)
    size = 4 * padded(vocab)
    for i in range(0, vocab, LANES):
        store_f32(scratch + 4 * i, load_f32_part(logits + 4 * i, min(vocab - i, LANES), _F(-np.inf)))
    n_stops = min(max(get_i64(ints + _N_MASK), 0), _MAX_MASK)
    if get_i64(ints + _IGNORE_EOS) == 0 and position >= get_i64(ints + _MIN_TOKENS):
        n_stops = 0
    if mask != 0:
        _forbid(scratch, vocab, mask)
        if n_stops and _allows_only(mask, vocab, mask_ids, n_stops):
            n_stops = 0  # the output is complete
    # The candidates are the whole vocabulary, a list of n, or a list that is not made: then n is CUT (sampler_cut.py).
    whole, n = bool(vocab > 0), vocab
    # Whatever the order: a filter before this one could leave nothing but them.
    for i in range(n_stops):
        _add_to(scratch, vocab, n, whole, get_i32(mask_ids + 4 * i), _F(-np.inf), True)
    order = get_i64(ints + _ORDER)
    output = tokens + 4 * start
    while order & 15:
        step = order & 15
        order = (order >> 4) & 0x0FFFFFFFFFFFFFFF
        if not _is_active(step, ints, floats, greedy, position):
            continue
        if n == CUT:
            taken = _step_of_cut(scratch, vocab, step, ints, floats, output, n_tokens - start)
            if taken:
                n = taken
                continue
            n = list_of_cut(scratch, vocab)
        changed = False
        if step == MASK:
            for i in range(min(get_i64(ints + _N_BIAS), _MAX_BIAS)):
                _add_to(scratch, vocab, n, whole, get_i32(bias_ids + 4 * i), get_f32(bias + 4 * i), False)
            changed = True
        elif step == REPEAT:
            _repetition(scratch, vocab, n, whole, tokens, n_tokens, get_f32(floats + _REPETITION))
            changed = True
        elif step == TEMPER:
            _temper(scratch if whole else scratch + 3 * size, n, t)
            changed = True
        elif step == CUT_K:
            k = get_i64(ints + _TOP_K)
            if k < n:
                if whole:
                    n = top_k_of_many(scratch, vocab, k) if vocab > SORTED else top_k(scratch, scratch, vocab, k)
                else:
                    n = k
                whole = False
        elif step == CUT_P:
            p = get_f32(floats + _TOP_P)
            if whole:
                n, whole = top_p(scratch, vocab, p), False
            else:
                enough = np.float64(p) * weigh_list(scratch, vocab, n)
                n = min(n, prefix_length(scratch, vocab, n, enough))
        elif step == PENALIZE:
            frequency, presence = get_f32(floats + _FREQUENCY), get_f32(floats + _PRESENCE)
            _penalties(scratch, vocab, n, whole, output, n_tokens - start, frequency, presence)
            changed = True
        elif step == DRY:
            multiplier, base = get_f32(floats + _DRY_MULTIPLIER), get_f32(floats + _DRY_BASE)
            last_n, allowed = get_i64(ints + _DRY_LAST_N), get_i64(ints + _DRY_ALLOWED)
            at = breakers if get_i64(ints + _HAS_BREAKERS) != 0 else 0
            changed = dry(scratch, vocab, n, whole, tokens, n_tokens, last_n, at, multiplier, base, max(allowed, 0))
        elif step == SIGMA:
            n = top_n_sigma(scratch, vocab, n, whole, get_f32(floats + _TOP_N_SIGMA))
        elif step == TYPICAL:
            kept = typical_p(scratch, vocab, n, whole, get_f32(floats + _TYPICAL_P))
            if kept != UNCHANGED:
                n, whole = kept, False
        elif step == CUT_MIN_P:
            n = min_p(scratch, vocab, n, whole, get_f32(floats + _MIN_P))
        elif step == XTC:
            n = xtc(scratch, vocab, n, whole, get_f32(floats + _XTC_THRESHOLD))
        if changed and not whole:
            sort_list(scratch, vocab, n, False)
    if greedy:  # a list that is not made begins with the first of the vocabulary
        return first_largest(scratch, vocab) if whole or n == CUT else get_i32(scratch + 4 * size)
    u = uniform(get_i64(ints + _SEED), position, get_i64(ints + _CHOICE), DRAW_STREAM)
    if n == CUT and not is_weighed(scratch, vocab):
        n = weigh_cut(scratch, vocab)
    if n == CUT:
        token = draw_of_cut(scratch, vocab, u)
        if token >= 0:
            return token
        n = list_of_cut(scratch, vocab)
    return _draw(scratch, vocab, n, whole, u)


@numba.njit(**INNER)
def logprobs(logits, vocab, token, n_top, out, top_ids, top_logprobs, scratch):
    """Log probability of `token` (f32 at out) and of the n_top best (i32, f32), of the raw distribution."""
    size = 4 * padded(vocab)
    top = largest(logits, vocab)
    total = weigh_vocabulary(logits, scratch + size, scratch + 8 * size + 4 * (1 << DIGIT), vocab, top)
    norm = np.float64(top) + log(total)
    put_f32(out, _F(np.float64(get_f32(logits + 4 * token)) - norm))
    if n_top > 0:
        n = top_k(scratch, logits, vocab, min(n_top, vocab))
        for i in range(n):
            put_i32(top_ids + 4 * i, get_i32(scratch + 4 * size + 4 * i))
            value = np.float64(get_f32(scratch + 3 * size + 4 * i)) - norm
            put_f32(top_logprobs + 4 * i, _F(value))


@numba.njit(**INNER)
def score(logits, vocab, token, n_top, out, top_ids, top_logprobs, scratch):
    """The rank of the known `token`, from 1, and its logprobs as above; NOT_FINITE without them.

    Its rank is its place among the ids by (logit descending, id ascending).
    """
    if not is_finite(logits, vocab) or token < 0 or token >= vocab:
        return NOT_FINITE
    logprobs(logits, vocab, token, n_top, out, top_ids, top_logprobs, scratch)
    return rank_of(logits, vocab, token)


@numba.njit(**JIT)
def draw(
    logits,
    vocab,
    tokens,
    n_tokens,
    output_start,
    ints,
    floats,
    mask_ids,
    bias_ids,
    bias,
    mask,
    breakers,
    scratch,
    out,
    top_ids,
    top_logprobs,
):
    """Entry: `sample`, then `logprobs` when the row wants them. Returns the id, or NOT_FINITE.

    For a token of a prompt that is scored: `score`.
    """
    n_scored = min(get_i64(ints + _SCORED), _MAX_TOP + 1)
    if n_scored > 0 and n_tokens < output_start:
        token = get_i32(tokens + 4 * n_tokens)
        return score(logits, vocab, token, n_scored - 1, out, top_ids, top_logprobs, scratch)
    token = sample(
        logits, vocab, tokens, n_tokens, output_start, ints, floats, mask_ids, bias_ids, bias, mask, breakers, scratch
    )
    n_top = min(get_i64(ints + _LOGPROBS), _MAX_TOP)
    if token >= 0 and n_top >= 0:
        logprobs(logits, vocab, token, n_top, out, top_ids, top_logprobs, scratch)
    else:
        put_f32(out, _F(0.0))
    return token


ENTRY_ARGUMENTS = 16
