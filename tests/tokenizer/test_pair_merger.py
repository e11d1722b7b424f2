"""Merges of pairs: all ways give what merging pair by pair gives."""

from __future__ import annotations

from collections.abc import Generator
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.key_table import KeyTable, make_slots
from stages.tokenizer.pair_merger import PairMerger

N = 9  # symbols
Pairs = dict[tuple[int, int], tuple[int, int]]  # rank and result
pairs = st.dictionaries(
    st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)), st.tuples(st.integers(0, 12), st.integers(0, N - 1))
)
words = st.lists(st.lists(st.integers(-1, N - 1), min_size=1, max_size=24), min_size=1, max_size=12)


def merged(word: list[int], ranks: Pairs) -> list[int]:
    """The definition."""
    symbols = list(word)
    while True:
        found = [(ranks[pair][0], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not found:
            return symbols
        at = min(found)[1]
        symbols[at : at + 2] = [ranks[symbols[at], symbols[at + 1]][1]]


def result(steps: Generator[None, None, list[int]]) -> list[int]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


@settings(deadline=None)
@given(pairs, words)
def test_all_ways_give_the_same(ranks: Pairs, some: list[list[int]]) -> None:
    keys = np.array([left << 32 | right for left, right in ranks], np.uint64)
    results = list(ranks.values())
    merger = PairMerger(
        KeyTable(keys, make_slots(keys)),
        np.array([symbol for _, symbol in results], np.int32),
        np.array([rank for rank, _ in results], np.int32),
    )
    expected = [merged(word, ranks) for word in some]
    assert [merger.merge(word) for word in some] == expected
    ends = np.cumsum([len(word) for word in some])
    symbols, new_ends = merger.merge_all(np.concatenate([np.array(word, np.int64) for word in some]), ends)
    assert [part.tolist() for part in np.split(symbols, new_ends[:-1])] == expected
    for word, symbols_of in zip(some, expected):
        assert result(merger.merge_long(word)) == symbols_of
