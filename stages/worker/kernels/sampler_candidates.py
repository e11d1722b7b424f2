"""Lists of candidates, sorted by (value descending, id ascending): top-k and the sort itself.

Nothing is sorted that need not be: top-k gathers the candidates above a threshold that is certainly low enough and
sorts those.  The scratch is drawn in sampler_vocabulary.py.
"""

from __future__ import annotations

import numba
import numpy as np

from stages.worker.kernels.buffer_sizes import DIGIT, MAX_BLOCK
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.sampler_vocabulary import largest, padded
from stages.worker.kernels.simd import (
    LANES,
    bits_of,
    exp,
    get_f32,
    get_i32,
    lanes_set,
    load_f32,
    load_f32_part,
    load_i32,
    lowest_bit,
    put_f32,
    put_i32,
    select_i32,
    splat_f32,
    splat_i32,
    store_f32,
    store_i32,
)

_F = np.float32


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
def _pass(keys, ids, new_keys, new_ids, histogram, n, source, shift):
    """One stable pass over 11 bits of `source`: the keys or the ids."""
    digits = (1 << DIGIT) - 1
    for i in range(digits + 1):
        put_i32(histogram + 4 * i, 0)
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
def sort_list(scratch, vocab, n, ids_ascend):
    """The list (CV, ID) of n by (value descending, id ascending)."""
    size = 4 * padded(vocab)
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
    first = 0 if ids_ascend else -2
    for number in range(first, 3):
        from_first = (number - first) % 2 == 0
        keys, new_keys, old_ids, new_ids = (k1, k2, ids, i2) if from_first else (k2, k1, i2, ids)
        if number < 0:
            _pass(keys, old_ids, new_keys, new_ids, histogram, n, old_ids, (number + 2) * DIGIT)
        else:
            _pass(keys, old_ids, new_keys, new_ids, histogram, n, keys, number * DIGIT)
    sign, ones = splat_i32(0x80000000), splat_i32(-1)
    for i in range(0, n, LANES):
        key = load_i32(k2 + 4 * i)
        negative = splat_i32(0) > key
        store_i32(values + 4 * i, select_i32(negative, key, key ^ sign ^ ones))
        store_i32(ids + 4 * i, load_i32(i2 + 4 * i))


@numba.njit(**INNER)
def write_weights(scratch, vocab, n, top):
    """W of the list: exp(value - top), n f32."""
    size = 4 * padded(vocab)
    w, values = scratch + size, scratch + 3 * size
    m = splat_f32(top)
    for i in range(0, n, LANES):
        store_f32(w + 4 * i, exp(load_f32(values + 4 * i) - m))


@numba.njit(**INNER)
def weigh_list(scratch, vocab, n):
    """W of the sorted list; zeros when its first is -inf. Returns the sequential f64 sum."""
    size = 4 * padded(vocab)
    w, values = scratch + size, scratch + 3 * size
    top = get_f32(values)
    none = top == _F(-np.inf)
    write_weights(scratch, vocab, n, _F(0.0) if none else top)
    total = 0.0
    for i in range(n):
        total += np.float64(get_f32(w + 4 * i))
    return total


@numba.njit(**INNER)
def gather_best(scratch, x, vocab, k, limit):
    """The list becomes candidates, by ascending id, among them the first k of the n f32 at x. Returns their number.

    Ends when there are `limit` or more. Of those at the threshold, the first k are gathered.
    """
    size = 4 * padded(vocab)
    values, ids = scratch + 3 * size, scratch + 4 * size
    blocks = (vocab + MAX_BLOCK - 1) // MAX_BLOCK
    threshold = _F(-np.inf)
    if k <= blocks // 2:
        # Each of the k best blocks holds a candidate that is not below the k-th best block's maximum.
        for b in range(blocks):
            start = b * MAX_BLOCK
            put_f32(values + 4 * b, largest(x + 4 * start, min(MAX_BLOCK, vocab - start)))
            put_i32(ids + 4 * b, b)
        sort_list(scratch, vocab, blocks, True)
        threshold = get_f32(values + 4 * (k - 1))
    bound, count, n_equal = splat_f32(threshold), 0, 0
    for i in range(0, vocab, LANES):
        rest = min(vocab - i, LANES)
        v = load_f32_part(x + 4 * i, rest, _F(-np.inf))
        found = lanes_set(v > bound if n_equal >= k else v >= bound) & ((1 << rest) - 1)
        while found:
            identity = i + lowest_bit(found)
            value = get_f32(x + 4 * identity)
            put_f32(values + 4 * count, value)
            put_i32(ids + 4 * count, identity)
            count += 1
            if value == threshold:
                n_equal += 1
            found &= found - 1
        if count >= limit:
            break
    return count


@numba.njit(**INNER)
def top_k(scratch, x, vocab, k):
    """The list becomes the first k of the n f32 at x, sorted."""
    n = gather_best(scratch, x, vocab, k, vocab)
    sort_list(scratch, vocab, n, True)
    return min(n, k)


@numba.njit(**INNER)
def prefix_length(scratch, vocab, n, enough):
    """How many of the sorted list's weights reach `enough`; n + 1 when all together do not."""
    w = scratch + 4 * padded(vocab)
    total = 0.0
    for i in range(n):
        total += np.float64(get_f32(w + 4 * i))
        if total >= enough:
            return i + 1
    return n + 1
