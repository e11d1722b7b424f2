"""Merges the symbols of words one after the other: what `PairMerger.merge` defines, as a jitted function.

In a word the pair with the lowest rank merges, of equal ranks the leftmost, until no pair has a rank.  A word is short:
each merge looks at all of its pairs and moves the rest.  Results of words of at most `KNOWN_SYMBOLS` symbols that
become at most `KNOWN_RESULTS` are remembered in a table that the caller keeps, one word for each place: a text has most
words more than once.

The one argument is the address of `N_PARAMETERS` int64, mostly addresses of arrays; compiled.py fills them.  With
N_SYMBOLS above 0 they are of one long word (merge_long.py).  Nothing is checked here.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.tokenizer.kernels.compiled import (
    ENDS,
    KEYS,
    KNOWN,
    KNOWN_BITS,
    KNOWN_ENTRY,
    KNOWN_RESULTS,
    KNOWN_SYMBOLS,
    MERGED,
    MIX,
    MIX_2,
    N_SLOTS,
    N_SYMBOLS,
    N_WORDS,
    OUT,
    OUT_ENDS,
    RANKS,
    SCRATCH_MERGED,
    SCRATCH_RANKS,
    SEED,
    SLOTS,
    SYMBOLS,
)
from stages.tokenizer.kernels.merge_long import merge_long
from stages.tokenizer.kernels.pairs import INLINE, OPTIONS, find, i32, i64, u64

_NEVER = 1 << 62
_U64 = np.uint64


@njit(**INLINE)
def _weigh(at, out, keys, slots, n_slots, seed, ranks, merged, pair_ranks, pair_merged):
    """Set rank and result of the pair of `out` at `at`."""
    entry = find(np.int64(out[at]), np.int64(out[at + 1]), keys, slots, n_slots, seed)
    if entry >= 0:
        pair_ranks[at], pair_merged[at] = np.int64(ranks[entry]), merged[entry]
    else:
        pair_ranks[at] = _NEVER


@njit(**OPTIONS)
def merge_words(parameters):
    """Merge all words; returns the number of symbols that remain. Of a long word: whether it is done."""
    given = i64(parameters)
    if given[N_SYMBOLS] > 0:
        return merge_long(parameters)
    symbols_at, ends, n_words = given[SYMBOLS], i64(given[ENDS]), given[N_WORDS]
    keys, slots, n_slots, seed = u64(given[KEYS]), i32(given[SLOTS]), given[N_SLOTS], given[SEED]
    ranks, merged = i32(given[RANKS]), i32(given[MERGED])
    out_at, out_ends = given[OUT], i64(given[OUT_ENDS])
    pair_ranks, pair_merged = i64(given[SCRATCH_RANKS]), i32(given[SCRATCH_MERGED])
    known_at = given[KNOWN]
    begin, done = 0, 0
    for word in range(n_words):
        end = ends[word]
        n = end - begin
        symbols = i32(symbols_at + 4 * begin)
        out = i32(out_at + 4 * done)
        begin = end
        if n == 1:
            out[0] = symbols[0]
            done += 1
            out_ends[word] = done
            continue
        is_short = 1 < n <= KNOWN_SYMBOLS
        known = i32(known_at)
        if is_short:
            mixed = _U64(n)
            for i in range(n):
                mixed = (mixed ^ _U64(symbols[i])) * _U64(MIX)
                mixed ^= mixed >> _U64(29)
            known = i32(known_at + 4 * KNOWN_ENTRY * np.int64((mixed * _U64(MIX_2)) >> _U64(64 - KNOWN_BITS)))
            if known[0] == n:
                i = 0
                while i < n and known[2 + KNOWN_RESULTS + i] == symbols[i]:
                    i += 1
                if i == n:
                    for j in range(known[1]):
                        out[j] = known[2 + j]
                    done += known[1]
                    out_ends[word] = done
                    continue
        for i in range(n):
            out[i] = symbols[i]
        for i in range(n - 1):
            _weigh(i, out, keys, slots, n_slots, seed, ranks, merged, pair_ranks, pair_merged)
        m = n
        while m > 1:
            best, at = _NEVER, -1
            for i in range(m - 1):
                if pair_ranks[i] < best:
                    best, at = pair_ranks[i], i
            if at < 0:
                break
            out[at] = pair_merged[at]
            for i in range(at + 1, m - 1):
                out[i] = out[i + 1]
            for i in range(at, m - 2):
                pair_ranks[i], pair_merged[i] = pair_ranks[i + 1], pair_merged[i + 1]
            m -= 1
            if at > 0:
                _weigh(at - 1, out, keys, slots, n_slots, seed, ranks, merged, pair_ranks, pair_merged)
            if at < m - 1:
                _weigh(at, out, keys, slots, n_slots, seed, ranks, merged, pair_ranks, pair_merged)
        if is_short and m <= KNOWN_RESULTS:
            known[0], known[1] = n, m
            for i in range(m):
                known[2 + i] = out[i]
            for i in range(n):
                known[2 + KNOWN_RESULTS + i] = symbols[i]
        done += m
        out_ends[word] = done
    return done
