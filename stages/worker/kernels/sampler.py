"""The sampler: one token from one row of logits, by docs/numerics.md; equals `twins/sampling.py`.

Nothing is sorted that need not be: top-k and top-p gather the candidates above a threshold that is known to
be low enough and sort those.  Sampler state is derived from the row's tokens each time, so that a step can
be repeated.

Scratch of one rank (`scratch_bytes`), n = vocabulary rounded up to SUM_BLOCK, in this order:

    VAL    n f32        the whole vocabulary's values, while nothing is selected
    W      n f32        weights exp(v - v_max), of VAL or of the list
    COUNT  n i32        how often an id was seen; zero whenever no step is using it
    CV     n f32        values of the listed candidates
    ID     n i32        their ids
    K1, K2 n i32 each   keys while sorting
    I2     n i32        ids while sorting
    HIST   2048 i32     digit counts
    SUM    n / 1024 f64 block sums
    BEST   n / 64 f32   block maxima
"""

from __future__ import annotations

import numba
import numpy as np

from shm import step_ring
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.simd import (
    JIT,
    LANES,
    bits_of,
    exp,
    f32_to_f64,
    first_lanes,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    lanes_set,
    load_f32,
    load_f32_part,
    load_i32,
    maximum,
    minimum,
    put_f32,
    put_i32,
    put_i64,
    reduce_add_f64,
    reduce_max,
    select_i32,
    splat_f32,
    splat_f64,
    splat_i32,
    store_f32,
    store_i32,
)

SUM_BLOCK = 1024
MAX_BLOCK = 64
NOT_FINITE = -1
MASK, REPEAT, TEMPER, CUT_K, CUT_P, PENALIZE = (
    step_ring.SAMPLER_STEPS[name] for name in ("mask", "repetition", "temperature", "top_k", "top_p", "penalties")
)
_V_MAX = 3.0e38
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = 12
_DIGIT = 11
_F = np.float32
_SEED, _CHOICE, _TOP_K = 8 * step_ring.SEED, 8 * step_ring.CHOICE, 8 * step_ring.TOP_K
_MIN_TOKENS, _IGNORE_EOS = 8 * step_ring.MIN_TOKENS, 8 * step_ring.IGNORE_EOS
_N_BIAS, _N_MASK, _ORDER = 8 * step_ring.N_BIAS, 8 * step_ring.N_MASK, 8 * step_ring.ORDER
_MAX_BIAS, _MAX_MASK, _MAX_TOP = step_ring.MAX_BIAS, step_ring.MAX_MASK, step_ring.MAX_TOP
_LOGPROBS = 8 * step_ring.LOGPROBS
_TEMPERATURE, _TOP_P, _REPETITION = 4 * step_ring.TEMPERATURE, 4 * step_ring.TOP_P, 4 * step_ring.REPETITION
_FREQUENCY, _PRESENCE = 4 * step_ring.FREQUENCY, 4 * step_ring.PRESENCE


def scratch_bytes(vocab_size: int) -> int:
    """Of one rank; zeroed when it is made."""
    n = -(-vocab_size // SUM_BLOCK) * SUM_BLOCK
    return 8 * 4 * n + 4 * (1 << _DIGIT) + 8 * (n // SUM_BLOCK) + 4 * (n // MAX_BLOCK)


@numba.njit(**INNER)
def _padded(vocab):
    return (vocab + SUM_BLOCK - 1) // SUM_BLOCK * SUM_BLOCK


# ------------------------------------------------------------------ scalars


@numba.njit(**INNER)
def uniform(seed, position, choice):
    """[0, 1) with 53 bits: Philox4x32-10, key = seed, counter = (position, choice, 0, 0)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = np.uint64(seed) & low, np.uint64(seed) >> shift
    c0, c1 = np.uint64(position) & low, np.uint64(choice) & low
    c2, c3 = np.uint64(0), np.uint64(0)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0 = (p1 >> shift) ^ c1 ^ k0
        c1 = p1 & low
        c2 = (p0 >> shift) ^ c3 ^ k1
        c3 = p0 & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return np.float64((c0 << np.uint64(21)) + (c1 >> np.uint64(11))) * 2.0**-53


@numba.njit(**INNER)
def log(x):
    """Natural logarithm of an f64 of at least 1."""
    k = 0
    while x >= 2.0:
        x *= 0.5
        k += 1
    x *= 0.5
    k += 1
    if x < _SQRT_HALF:
        x *= 2.0
        k -= 1
    z = (x - 1.0) / (x + 1.0)
    square = z * z
    p = 1.0 / (2 * _LOG_TERMS - 1)
    for i in range(_LOG_TERMS - 2, -1, -1):
        p = p * square + 1.0 / (2 * i + 1)
    return k * _LN2 + 2.0 * z * p


# ------------------------------------------------------------------ the whole vocabulary


@numba.njit(**INNER)
def _largest(x, n):
    """Maximum of n f32."""
    low = _F(-np.inf)
    a, b = splat_f32(low), splat_f32(low)
    whole = n // 32 * 32
    for i in range(0, 4 * whole, 128):
        a = maximum(load_f32(x + i), a)
        b = maximum(load_f32(x + i + 64), b)
    for i in range(whole, n, LANES):
        a = maximum(load_f32_part(x + 4 * i, min(n - i, LANES), low), a)
    return reduce_max(maximum(a, b))


@numba.njit(**INNER)
def is_finite(x, n):
    """Whether none of n f32 is infinite or NaN."""
    magnitude, most = splat_i32(0x7FFFFFFF), splat_i32(0x7F7FFFFF)
    bad = first_lanes(0)
    whole = n // LANES * LANES
    for i in range(0, 4 * whole, 64):
        bad = bad | ((bits_of(load_f32(x + i)) & magnitude) > most)
    if whole < n:
        v = load_f32_part(x + 4 * whole, n - whole, _F(0.0))
        bad = bad | ((bits_of(v) & magnitude) > most)
    return lanes_set(bad) == 0


@numba.njit(**INNER)
def _lowest_bit(bits):
    i = 0
    while (bits >> i) & 1 == 0:
        i += 1
    return i


@numba.njit(**INNER)
def first_largest(x, n):
    """The lowest index of the maximum of n f32."""
    top = splat_f32(_largest(x, n))
    for i in range(0, n, LANES):
        found = lanes_set(load_f32_part(x + 4 * i, min(n - i, LANES), _F(-np.inf)) == top)
        found &= (1 << min(n - i, LANES)) - 1
        if found:
            return i + _lowest_bit(found)
    return 0


@numba.njit(**INNER)
def _weigh(x, w, sums, n, top):
    """w = exp(x - top) over n f32, f64 sums of blocks at `sums`; returns the sequential sum of these."""
    m = splat_f32(top)
    low = _F(-np.inf)
    total = 0.0
    for start in range(0, n, SUM_BLOCK):
        lanes = splat_f64(0.0)
        stop = min(start + SUM_BLOCK, n)
        for i in range(start, stop, LANES):
            e = exp(load_f32_part(x + 4 * i, min(stop - i, LANES), low) - m)
            store_f32(w + 4 * i, e)
            lanes = lanes + f32_to_f64(e)
        block = reduce_add_f64(lanes)
        _put_f64(sums + start // SUM_BLOCK * 8, block)
        total += block
    return total


@numba.njit(**INNER)
def _put_f64(address, value):
    put_i64(address, np.float64(value).view(np.int64))


@numba.njit(**INNER)
def _gather(x, n, threshold, values, ids):
    """All of n f32 that are at least `threshold`, by ascending id; how many."""
    least = splat_f32(threshold)
    count = 0
    for i in range(0, n, LANES):
        rest = min(n - i, LANES)
        found = lanes_set(load_f32_part(x + 4 * i, rest, _F(-np.inf)) >= least)
        if found:
            for lane in range(rest):
                if (found >> lane) & 1:
                    put_f32(values + 4 * count, get_f32(x + 4 * (i + lane)))
                    put_i32(ids + 4 * count, i + lane)
                    count += 1
    return count


# ------------------------------------------------------------------ sorted lists of candidates


@numba.njit(**INNER)
def _make_keys(values, keys, n):
    """u32 that ascend as the f32 descend; -0 and 0 are the same."""
    zero, sign, ones = splat_f32(_F(0.0)), splat_i32(0x80000000), splat_i32(-1)
    for i in range(0, n, LANES):
        bits = bits_of(load_f32(values + 4 * i) + zero)
        negative = splat_i32(0) > bits
        # Ascending order would be ~bits for negative ones and bits ^ sign for the others.
        store_i32(keys + 4 * i, select_i32(negative, bits, bits ^ sign ^ ones))


@numba.njit(**INNER)
def _pass(keys, ids, new_keys, new_ids, histogram, n, shift, by_id):
    """One stable pass over 11 bits of the key (or of the id)."""
    digits = (1 << _DIGIT) - 1
    for i in range(digits + 1):
        put_i32(histogram + 4 * i, 0)
    source = ids if by_id else keys
    for i in range(n):
        at = histogram + 4 * (((get_i32(source + 4 * i) & 0xFFFFFFFF) >> shift) & digits)
        put_i32(at, get_i32(at) + 1)
    total = 0
    for i in range(digits + 1):
        count = get_i32(histogram + 4 * i)
        put_i32(histogram + 4 * i, total)
        total += count
    for i in range(n):
        at = histogram + 4 * (((get_i32(source + 4 * i) & 0xFFFFFFFF) >> shift) & digits)
        place = get_i32(at)
        put_i32(at, place + 1)
        put_i32(new_keys + 4 * place, get_i32(keys + 4 * i))
        put_i32(new_ids + 4 * place, get_i32(ids + 4 * i))


@numba.njit(**INNER)
def _sort(scratch, vocab, n, ids_ascend):
    """The list (CV, ID) of n by (value descending, id ascending)."""
    size = 4 * _padded(vocab)
    values, ids = scratch + 3 * size, scratch + 4 * size
    if n <= 48:
        for i in range(1, n):
            v, identity = get_f32(values + 4 * i), get_i32(ids + 4 * i)
            j = i
            while j > 0:
                before = get_f32(values + 4 * j - 4)
                if before > v or (before == v and get_i32(ids + 4 * j - 4) < identity):
                    break
                put_f32(values + 4 * j, before)
                put_i32(ids + 4 * j, get_i32(ids + 4 * j - 4))
                j -= 1
            put_f32(values + 4 * j, v)
            put_i32(ids + 4 * j, identity)
        return
    k1, k2, i2 = scratch + 5 * size, scratch + 6 * size, scratch + 7 * size
    histogram = scratch + 8 * size
    _make_keys(values, k1, n)
    if not ids_ascend:
        _pass(k1, ids, k2, i2, histogram, n, 0, True)
        _pass(k2, i2, k1, ids, histogram, n, _DIGIT, True)
    _pass(k1, ids, k2, i2, histogram, n, 0, False)
    _pass(k2, i2, k1, ids, histogram, n, _DIGIT, False)
    _pass(k1, ids, k2, i2, histogram, n, 2 * _DIGIT, False)
    sign, ones = splat_i32(0x80000000), splat_i32(-1)
    for i in range(0, n, LANES):
        key = load_i32(k2 + 4 * i)
        negative = splat_i32(0) > key
        store_i32(values + 4 * i, select_i32(negative, key, key ^ sign ^ ones))
        store_i32(ids + 4 * i, load_i32(i2 + 4 * i))


@numba.njit(**INNER)
def _list_weights(scratch, vocab, n):
    """W of the sorted list; zeros when its first is -inf. Returns the sequential f64 sum."""
    size = 4 * _padded(vocab)
    w, values = scratch + size, scratch + 3 * size
    top = get_f32(values)
    none = top == _F(-np.inf)
    m = splat_f32(_F(0.0) if none else top)
    for i in range(0, n, LANES):
        store_f32(w + 4 * i, exp(load_f32(values + 4 * i) - m))
    total = 0.0
    for i in range(n):
        total += np.float64(get_f32(w + 4 * i))
    return total


@numba.njit(**INNER)
def _best(scratch, x, vocab, k):
    """The list becomes the first k of the n f32 at x, sorted."""
    size = 4 * _padded(vocab)
    values, ids = scratch + 3 * size, scratch + 4 * size
    blocks = (vocab + MAX_BLOCK - 1) // MAX_BLOCK
    threshold = _F(-np.inf)
    if k <= blocks // 2:
        # Each of the k best blocks holds a candidate that is not below the k-th best block's maximum.
        for b in range(blocks):
            start = b * MAX_BLOCK
            put_f32(values + 4 * b, _largest(x + 4 * start, min(MAX_BLOCK, vocab - start)))
            put_i32(ids + 4 * b, b)
        _sort(scratch, vocab, blocks, True)
        threshold = get_f32(values + 4 * (k - 1))
    n = _gather(x, vocab, threshold, values, ids)
    _sort(scratch, vocab, n, True)
    return min(n, k)


@numba.njit(**INNER)
def _prefix(scratch, vocab, n, enough):
    """How many of the sorted list's weights reach `enough`; n + 1 when all together do not."""
    w = scratch + 4 * _padded(vocab)
    total = 0.0
    for i in range(n):
        total += np.float64(get_f32(w + 4 * i))
        if total >= enough:
            return i + 1
    return n + 1


@numba.njit(**INNER)
def _nucleus(scratch, vocab, p):
    """The list becomes the shortest prefix of the sorted vocabulary (VAL) with share p of the weight."""
    size = 4 * _padded(vocab)
    x, w, values, ids = scratch, scratch + size, scratch + 3 * size, scratch + 4 * size
    top = _largest(x, vocab)
    if top == _F(-np.inf):
        put_f32(values, top)
        put_i32(ids, 0)
        return 1
    enough = np.float64(p) * _weigh(x, w, scratch + 8 * size + 4 * (1 << _DIGIT), vocab, top)
    below = _F(2.0)
    while True:
        last = below > _F(90.0)
        n = _gather(x, vocab, _F(-np.inf) if last else top - below, values, ids)
        about = 0.0
        if not last:
            for i in range(n):
                about += np.float64(get_f32(w + 4 * get_i32(ids + 4 * i)))
        if last or about >= enough * 0.999999:
            _sort(scratch, vocab, n, True)
            # W of the vocabulary is needed for the next try only if this one fails.
            _list_weights_only(scratch, vocab, n, top)
            kept = _prefix(scratch, vocab, n, enough)
            if last or kept <= n:
                return min(kept, n)
            _weigh(x, w, scratch + 8 * size + 4 * (1 << _DIGIT), vocab, top)
        below = below * _F(2.0)


@numba.njit(**INNER)
def _list_weights_only(scratch, vocab, n, top):
    size = 4 * _padded(vocab)
    w, values = scratch + size, scratch + 3 * size
    m = splat_f32(top)
    for i in range(0, n, LANES):
        store_f32(w + 4 * i, exp(load_f32(values + 4 * i) - m))


# ------------------------------------------------------------------ steps that change values


@numba.njit(**INNER)
def _add_to(scratch, vocab, n, whole, identity, value, replace):
    """Add `value` to (or put it at) the candidate `identity`, if it is one."""
    size = 4 * _padded(vocab)
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
    size = 4 * _padded(vocab)
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
    size = 4 * _padded(vocab)
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
    divisor, most = splat_f32(t), splat_f32(_F(_V_MAX))
    for i in range(0, n, LANES):
        store_f32(x + 4 * i, minimum(load_f32(x + 4 * i) / divisor, most))


# ------------------------------------------------------------------ drawing


@numba.njit(**INNER)
def _draw(scratch, vocab, n, whole, u):
    size = 4 * _padded(vocab)
    w, ids = scratch + size, scratch + 4 * size
    total = 0.0
    first, stop = 0, n
    if whole:
        top = _largest(scratch, vocab)
        if top == _F(-np.inf):
            return 0
        sums = scratch + 8 * size + 4 * (1 << _DIGIT)
        threshold = u * _weigh(scratch, w, sums, vocab, top)
        blocks = (vocab + SUM_BLOCK - 1) // SUM_BLOCK
        block = 0
        while block < blocks - 1 and total + get_f64(sums + 8 * block) <= threshold:
            total += get_f64(sums + 8 * block)
            block += 1
        first, stop = block * SUM_BLOCK, min((block + 1) * SUM_BLOCK, vocab)
    else:
        if get_f32(scratch + 3 * size) == _F(-np.inf):
            return get_i32(ids)
        threshold = u * _list_weights(scratch, vocab, n)
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
    )


@numba.njit(**INNER)
def sample(logits, vocab, tokens, n_tokens, output_start, ints, floats, mask_ids, bias_ids, bias, scratch):
    """The id drawn after n_tokens tokens (i32), or NOT_FINITE.

    logits: vocab f32, not written; ints, floats, mask_ids, bias_ids, bias: the row's arrays of the steps
    arena (i64, f32, i32, i32, f32); scratch: as above.
    """
    if not is_finite(logits, vocab):
        return NOT_FINITE
    start = min(max(output_start, 0), n_tokens)
    position = n_tokens - output_start
    t = get_f32(floats + _TEMPERATURE)
    greedy = not t > _F(0.0)
    if greedy and _is_plain(ints, floats, position):
        return first_largest(logits, vocab)
    size = 4 * _padded(vocab)
    for i in range(0, vocab, LANES):
        store_f32(scratch + 4 * i, load_f32_part(logits + 4 * i, min(vocab - i, LANES), _F(-np.inf)))
    whole, n = True, vocab
    order = get_i64(ints + _ORDER)
    while order & 15:
        step = order & 15
        order = (order >> 4) & 0x0FFFFFFFFFFFFFFF
        changed = False
        if step == MASK:
            if get_i64(ints + _IGNORE_EOS) != 0 or position < get_i64(ints + _MIN_TOKENS):
                for i in range(min(max(get_i64(ints + _N_MASK), 0), _MAX_MASK)):
                    _add_to(scratch, vocab, n, whole, get_i32(mask_ids + 4 * i), _F(-np.inf), True)
                    changed = True
            for i in range(min(max(get_i64(ints + _N_BIAS), 0), _MAX_BIAS)):
                _add_to(scratch, vocab, n, whole, get_i32(bias_ids + 4 * i), get_f32(bias + 4 * i), False)
                changed = True
        elif step == REPEAT:
            r = get_f32(floats + _REPETITION)
            if r != _F(1.0):
                _repetition(scratch, vocab, n, whole, tokens, n_tokens, r)
                changed = True
        elif step == TEMPER:
            if not greedy and t != _F(1.0):
                _temper(scratch if whole else scratch + 3 * size, n, t)
                changed = True
        elif step == CUT_K:
            k = get_i64(ints + _TOP_K)
            if 0 < k < n:
                n = _best(scratch, scratch, vocab, k) if whole else k
                whole = False
        elif step == CUT_P:
            p = get_f32(floats + _TOP_P)
            if p < _F(1.0):
                if whole:
                    n = _nucleus(scratch, vocab, p)
                    whole = False
                else:
                    enough = np.float64(p) * _list_weights(scratch, vocab, n)
                    n = min(n, _prefix(scratch, vocab, n, enough))
        elif step == PENALIZE:
            frequency, presence = get_f32(floats + _FREQUENCY), get_f32(floats + _PRESENCE)
            if frequency != _F(0.0) or presence != _F(0.0):
                output = tokens + 4 * start
                _penalties(scratch, vocab, n, whole, output, n_tokens - start, frequency, presence)
                changed = True
        if changed and not whole:
            _sort(scratch, vocab, n, False)
    if greedy:
        return first_largest(scratch, vocab) if whole else get_i32(scratch + 4 * size)
    return _draw(scratch, vocab, n, whole, uniform(get_i64(ints + _SEED), position, get_i64(ints + _CHOICE)))


@numba.njit(**INNER)
def logprobs(logits, vocab, token, n_top, out, top_ids, top_logprobs, scratch):
    """Log probability of `token` (f32 at out) and of the n_top best (i32, f32), of the raw distribution."""
    size = 4 * _padded(vocab)
    top = _largest(logits, vocab)
    total = _weigh(logits, scratch + size, scratch + 8 * size + 4 * (1 << _DIGIT), vocab, top)
    norm = np.float64(top) + log(total)
    put_f32(out, _F(np.float64(get_f32(logits + 4 * token)) - norm))
    if n_top > 0:
        n = _best(scratch, logits, vocab, min(n_top, vocab))
        for i in range(n):
            put_i32(top_ids + 4 * i, get_i32(scratch + 4 * size + 4 * i))
            value = np.float64(get_f32(scratch + 3 * size + 4 * i)) - norm
            put_f32(top_logprobs + 4 * i, _F(value))


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
    scratch,
    out,
    top_ids,
    top_logprobs,
):
    """Entry: `sample`, then `logprobs` when the row asks for them. The id, or NOT_FINITE."""
    token = sample(logits, vocab, tokens, n_tokens, output_start, ints, floats, mask_ids, bias_ids, bias, scratch)
    n_top = min(get_i64(ints + _LOGPROBS), _MAX_TOP)
    if token >= 0 and n_top >= 0:
        logprobs(logits, vocab, token, n_top, out, top_ids, top_logprobs, scratch)
    else:
        put_f32(out, _F(0.0))
    return token


ENTRY_ARGUMENTS = 14
