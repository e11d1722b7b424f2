"""Merges the symbols of one long word, some steps at a time: what `PairMerger.merge_long` does, as a jitted function.

The pairs that may merge are in a heap by (rank, place).  A pair whose symbols have changed since stays in it until it
comes up, and is dropped then: another pair has another rank, or a key of its own that is equal.  All state is in the
caller's arrays (compiled.py), which have room for three keys a symbol: one at first, and two for each merge.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.tokenizer.kernels.compiled import (
    AFTER,
    BEFORE,
    GONE,
    HEAP,
    HEAP_SIZE,
    KEYS,
    MERGED,
    N_SLOTS,
    N_SYMBOLS,
    RANKS,
    SEED,
    SLOTS,
    STEPS,
    SYMBOLS,
    WEIGHED,
)
from stages.tokenizer.kernels.pairs import INLINE, OPTIONS, find, i32, i64, u64


@njit(**INLINE)
def _push(heap, size, key):
    """Add a key to a heap of `size` keys."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if heap[parent] <= key:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = key


@njit(**INLINE)
def _pop(heap, size):
    """Remove and return the least key of a heap of `size` keys."""
    least, last = heap[0], heap[size - 1]
    n, at = size - 1, 0
    while 2 * at + 1 < n:
        child = 2 * at + 1
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last
    return least


@njit(**OPTIONS)
def merge_long(parameters):
    """Weigh or merge at most `STEPS` pairs; returns 1 when none is left that merges, else 0."""
    given = i64(parameters)
    symbols, n, steps = i32(given[SYMBOLS]), given[N_SYMBOLS], given[STEPS]
    keys, slots, n_slots, seed = u64(given[KEYS]), i32(given[SLOTS]), given[N_SLOTS], given[SEED]
    ranks, merged = i32(given[RANKS]), i32(given[MERGED])
    after, before, heap = i32(given[AFTER]), i32(given[BEFORE]), i64(given[HEAP])
    size, at = given[HEAP_SIZE], given[WEIGHED]
    while at < n and steps > 0:
        steps -= 1
        after[at], before[at] = at + 1, at - 1
        if at + 1 < n:
            entry = find(np.int64(symbols[at]), np.int64(symbols[at + 1]), keys, slots, n_slots, seed)
            if entry >= 0:
                _push(heap, size, np.int64(ranks[entry]) << 32 | at)
                size += 1
        at += 1
    while at == n and size > 0 and steps > 0:
        steps -= 1
        key = _pop(heap, size)
        size -= 1
        left = key & 0xFFFFFFFF
        right = np.int64(after[left])
        if symbols[left] == GONE or right >= n:
            continue
        entry = find(np.int64(symbols[left]), np.int64(symbols[right]), keys, slots, n_slots, seed)
        if entry < 0 or np.int64(ranks[entry]) != key >> 32:
            continue
        symbols[left], symbols[right] = merged[entry], GONE
        behind, ahead = np.int64(after[right]), np.int64(before[left])
        after[left] = behind
        if behind < n:
            before[behind] = left
            entry = find(np.int64(symbols[left]), np.int64(symbols[behind]), keys, slots, n_slots, seed)
            if entry >= 0:
                _push(heap, size, np.int64(ranks[entry]) << 32 | left)
                size += 1
        if ahead >= 0:
            entry = find(np.int64(symbols[ahead]), np.int64(symbols[left]), keys, slots, n_slots, seed)
            if entry >= 0:
                _push(heap, size, np.int64(ranks[entry]) << 32 | ahead)
                size += 1
    given[HEAP_SIZE], given[WEIGHED] = size, at
    return 1 if at == n and size == 0 else 0
