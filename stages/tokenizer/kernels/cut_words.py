"""Cuts words into tokens of a trie (`pipeline/models/token_trie.py`), as a jitted function, some steps at a time.

Two ways: the tokens whose scores have the highest sum (`TokenLattice.cut`), and the longest token that fits, from the
beginning of the word on (`WordPieceEncoder`).  The caller's codes have `END` behind each word, the last one too.
Results of words of at most `KNOWN_SYMBOLS` characters that become at most `KNOWN_RESULTS` tokens are remembered in a
table that the caller keeps, one word for each place.  All other state is in the caller's arrays (word_cutter.py), which
have an element for each code.  Nothing is checked here.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stages.tokenizer.kernels.compiled import MIX, MIX_2
from stages.tokenizer.kernels.pairs import INLINE, OPTIONS, f32, f64, i32, i64
from stages.tokenizer.kernels.word_cutter import (
    AT,
    BEGIN,
    BEGINS,
    BEST,
    CODES,
    END,
    FIRST,
    IS_SCORED,
    KNOWN,
    KNOWN_BITS,
    KNOWN_ENTRY,
    KNOWN_RESULTS,
    KNOWN_SYMBOLS,
    LAST,
    N_CODES,
    N_FIRST,
    N_OUT,
    N_WORDS,
    NODE,
    NODE_CODES,
    NODES,
    OUT,
    OUT_ENDS,
    STEPS,
    UNKNOWN,
    UNKNOWN_SCORE,
    WORD_ENDS,
    WRITTEN,
)

_U64 = np.uint64
_SCANNED = 8  # children that are compared one by one


@njit(**INLINE)
def _child(given, node, code):
    """The node behind a character; -1: none."""
    if node == 0 and 0 <= code < N_FIRST:
        return np.int64(i32(given[FIRST])[code])
    nodes, codes = i32(given[NODES]), i32(given[NODE_CODES])
    begin, end = np.int64(nodes[NODE * node]), np.int64(nodes[NODE * (node + 1)])
    while end - begin > _SCANNED:
        middle = (begin + end) >> 1
        if codes[middle] <= code:
            begin = middle
        else:
            end = middle
    while begin < end:
        if codes[begin] == code:
            return begin
        begin += 1
    return np.int64(-1)


@njit(**INLINE)
def _weigh(given, at, steps):
    """Find the best tokens up to each place of a word; returns where it stopped and the steps that are left."""
    codes, n = i32(given[CODES]), given[N_CODES]
    nodes, scores = i32(given[NODES]), f32(given[NODES])
    best, last, begins = f64(given[BEST]), i32(given[LAST]), i32(given[BEGINS])
    unknown, unknown_score = given[UNKNOWN], f64(given[UNKNOWN_SCORE])[0]
    while codes[at] != END and steps > 0:
        steps -= 1
        sum_before = best[at]
        node, end, is_known = np.int64(0), at, False
        while end < n:
            node = _child(given, node, np.int64(codes[end]))
            if node < 0:
                break
            steps -= 1
            end += 1
            token = nodes[NODE * node + 1]
            if token >= 0:
                is_known |= end == at + 1
                total = sum_before + np.float64(scores[NODE * node + 2])
                if total > best[end]:
                    best[end], last[end], begins[end] = total, token, at
        if not is_known and sum_before + unknown_score > best[at + 1]:
            best[at + 1], last[at + 1], begins[at + 1] = sum_before + unknown_score, unknown, at
        at += 1
    return at, steps


@njit(**INLINE)
def _write(given, begin, end, done):
    """Write the tokens of a word, from its last one back; unknown ones side by side are one. Returns where they end."""
    last, begins, unknown = i32(given[LAST]), i32(given[BEGINS]), given[UNKNOWN]
    out, out_ends = i32(given[OUT]), i32(given[OUT_ENDS])
    at, first, follower = end, end, np.int64(-1)
    while at > begin:
        token = np.int64(last[at])
        if token != unknown or follower != unknown:
            first -= 1
            out[first], out_ends[first] = token, at - begin
        follower = token
        at = np.int64(begins[at])
    # There are not more tokens than characters: what is overwritten was read.
    for place in range(first, end):
        out[done], out_ends[done] = out[place], out_ends[place]
        done += 1
    return done


@njit(**INLINE)
def _longest(given, begin, at, first, done, steps):
    """Cut a word into the longest tokens; one with a part that is no token has none, or the unknown token.

    Returns where it stopped, where the tokens end, and the steps that are left.
    """
    codes, n = i32(given[CODES]), given[N_CODES]
    nodes, unknown = i32(given[NODES]), given[UNKNOWN]
    out, out_ends = i32(given[OUT]), i32(given[OUT_ENDS])
    while codes[at] != END and steps > 0:
        steps -= 1
        node, end, token, token_end = np.int64(0), at, np.int64(-1), at
        while end < n:
            node = _child(given, node, np.int64(codes[end]))
            if node < 0:
                break
            steps -= 1
            end += 1
            if nodes[NODE * node + 1] >= 0:
                token, token_end = np.int64(nodes[NODE * node + 1]), end
        if token < 0:
            done = first
            while codes[at] != END:
                at += 1
            if unknown >= 0:
                out[done], out_ends[done] = unknown, at - begin
                done += 1
            break
        at = token_end
        out[done], out_ends[done] = token, at - begin
        done += 1
    return at, done, steps


@njit(**OPTIONS)
def cut_words(parameters):
    """Make at most `STEPS` steps and those of one place; returns 1 when all words are cut, else 0."""
    given = i64(parameters)
    codes, n, steps = i32(given[CODES]), given[N_CODES], given[STEPS]
    out, out_ends, word_ends = i32(given[OUT]), i32(given[OUT_ENDS]), i32(given[WORD_ENDS])
    # The word: its place, how far it is cut, how many are done. The output: of the words before, and with this one.
    begin, at, word, first, done = given[BEGIN], given[AT], given[N_WORDS], given[N_OUT], given[WRITTEN]
    is_scored = given[IS_SCORED] != 0
    while begin < n and steps > 0:
        length, mixed = np.int64(0), _U64(0)
        while length <= KNOWN_SYMBOLS and codes[begin + length] != END:
            mixed = (mixed ^ _U64(codes[begin + length])) * _U64(MIX)
            mixed ^= mixed >> _U64(29)
            length += 1
        is_short = 1 <= length <= KNOWN_SYMBOLS
        known = i32(given[KNOWN] + 4 * KNOWN_ENTRY * np.int64((mixed * _U64(MIX_2)) >> _U64(64 - KNOWN_BITS)))
        symbols = 2 + 2 * KNOWN_RESULTS
        if is_short and at == begin and known[0] == length:
            same = np.int64(0)
            while same < length and known[symbols + same] == codes[begin + same]:
                same += 1
            if same == length:
                for j in range(known[1]):
                    out[done], out_ends[done] = known[2 + j], known[2 + KNOWN_RESULTS + j]
                    done += 1
                word_ends[word] = done
                word += 1
                begin += length + 1
                at, first = begin, done
                steps -= 1
                continue
        if is_scored:
            if at == begin:
                f64(given[BEST])[at] = 0.0
            at, steps = _weigh(given, at, steps)
        else:
            at, done, steps = _longest(given, begin, at, first, done, steps)
        if codes[at] != END:
            break
        steps -= 1
        if is_scored:
            done = _write(given, begin, at, done)
        if is_short and done - first <= KNOWN_RESULTS:
            known[0], known[1] = length, done - first
            for j in range(done - first):
                known[2 + j], known[2 + KNOWN_RESULTS + j] = out[first + j], out_ends[first + j]
            for i in range(length):
                known[symbols + i] = codes[begin + i]
        word_ends[word] = done
        word += 1
        begin = at + 1
        at, first = begin, done
    given[BEGIN], given[AT], given[N_WORDS], given[N_OUT], given[WRITTEN] = begin, at, word, first, done
    return 1 if begin == n else 0
