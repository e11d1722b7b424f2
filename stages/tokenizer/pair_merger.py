"""Byte-pair merges over mapped tables: in a word the pair with the lowest rank merges, of equal ranks the leftmost.

Four ways to the same result.  `compiled` has a kernel that merges all words of a text in a row.  `merge` is for one
short word.  `merge_all` merges once in every word at the same time, with NumPy, again and again.  `merge_long` has a
heap, and yields between steps.  A word is a list of symbols (`pipeline/models/vocabulary_tables.py`); -1 stands for one
that never merges.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.models.key_table import KeyTable
from stages.tokenizer.kernels.compiled import WordMerger

MERGES_PER_STEP = 8192  # of `merge_long`: about 20 ms
_NEVER = 1 << 62  # above all keys
_MAX_KNOWN = 1 << 15  # pairs that `merge` remembers; some 4 MB
_PLACE = (1 << 32) - 1
_GONE = -2
Symbols = NDArray[np.int64]


class PairMerger:
    """Merges the symbols of words. `pairs`: the table of pairs; `merged` and `ranks`: of each of its entries, i32."""

    def __init__(self, pairs: KeyTable, merged: NDArray[np.int32], ranks: NDArray[np.int32]) -> None:
        if not len(pairs) == len(merged) == len(ranks):
            raise ValueError(f"{len(pairs)} pairs become {len(merged)} symbols of {len(ranks)} ranks")
        if not merged.dtype == ranks.dtype == np.int32:  # the kernel reads them without looking
            raise ValueError(f"symbols are {merged.dtype} and ranks {ranks.dtype}, expected int32")
        self._pairs, self._merged, self._ranks = pairs, merged, ranks
        self._known: dict[int, tuple[int, int]] = {}

    def compiled(self) -> WordMerger | None:
        """The kernel over the same tables; None if it is not stored."""
        return WordMerger.find(self._pairs, self._merged, self._ranks)

    def _find(self, left: int, right: int) -> tuple[int, int]:
        """Return rank and result of a pair; the rank is `_NEVER` if the two do not merge."""
        key = left << 32 | right
        found = self._known.get(key)
        if found is None:
            entry = self._pairs.find_one(key) if left >= 0 <= right else -1
            found = (int(self._ranks[entry]), int(self._merged[entry])) if entry >= 0 else (_NEVER, -1)
            if len(self._known) >= _MAX_KNOWN:
                self._known = {}
            self._known[key] = found
        return found

    def merge(self, word: list[int]) -> list[int]:
        """Return the merged symbols of a short word."""
        symbols, find = list(word), self._find
        pairs = [find(left, right) for left, right in pairwise(symbols)]
        while pairs:
            rank = min(pairs)[0]
            if rank == _NEVER:
                break
            at = next(i for i, pair in enumerate(pairs) if pair[0] == rank)
            symbol = pairs[at][1]
            symbols[at : at + 2] = [symbol]
            del pairs[at]
            if at:
                pairs[at - 1] = find(symbols[at - 1], symbol)
            if at < len(pairs):
                pairs[at] = find(symbol, symbols[at + 1])
        return symbols

    def merge_long(self, word: list[int]) -> Generator[None, None, list[int]]:
        """Return the merged symbols of a word of any length. Yields between steps."""
        n, find = len(word), self._find
        symbols = array("q", word)  # `_GONE`: merged into the one before
        after, before = array("i", range(1, n + 1)), array("i", range(-1, n - 1))
        heap = []  # rank << 32 | place
        for left in range(n - 1):
            if left % MERGES_PER_STEP == MERGES_PER_STEP - 1:
                yield
            rank = find(symbols[left], symbols[left + 1])[0]
            if rank != _NEVER:
                heap.append(rank << 32 | left)
        heapq.heapify(heap)
        count = 0
        while heap:
            count += 1
            if not count % MERGES_PER_STEP:
                yield
            key = heapq.heappop(heap)
            left = key & _PLACE
            right = after[left]
            if symbols[left] == _GONE or right >= n:
                continue
            # Another pair than the one that the key was made of has another rank, or a key of its own that is equal.
            rank, symbol = find(symbols[left], symbols[right])
            if rank != key >> 32:
                continue
            symbols[left], symbols[right] = symbol, _GONE
            after[left] = right = after[right]
            if right < n:
                before[right] = left
            for first, second in ((before[left], left), (left, right)):
                if first >= 0 and second < n and (rank := find(symbols[first], symbols[second])[0]) != _NEVER:
                    heapq.heappush(heap, rank << 32 | first)
        return [symbol for symbol in symbols if symbol != _GONE]

    def merge_all(self, symbols: Symbols, ends: Symbols) -> tuple[Symbols, Symbols]:
        """Merge words that are not empty: their symbols one after the other, and where each ends. Returns the same."""
        n = len(symbols)
        starts = np.concatenate([[0], ends[:-1]])
        result = symbols.copy()
        place = np.arange(n)  # of the symbols that remain, in `result`
        while len(starts):
            current = np.append(result[place], -1)
            n = len(place)
            after, before = np.arange(1, n + 2), np.arange(-1, n)
            after[np.append(starts[1:], n) - 1] = n  # n: none
            before[starts] = n
            keys, merged = np.full(n + 1, _NEVER), np.zeros(n + 1, np.int64)
            self._weigh(np.arange(n), after[:n], current, keys, merged)
            n_words = len(starts)
            while True:
                best = np.minimum.reduceat(keys[:n], starts)
                best = best[best < _NEVER]
                if 2 * len(best) < n_words or not len(best):
                    break
                left = best & _PLACE
                right = after[left]
                current[left] = merged[left]
                current[right], keys[right] = _GONE, _NEVER
                after[left] = next_ = after[right]
                before[next_] = left
                previous = before[left]
                self._weigh(np.concatenate((previous, left)), np.concatenate((left, next_)), current, keys, merged)
            result[place] = current[:n]
            # The other words are done: the rest goes on without them, and without the symbols that are gone.
            is_busy = np.minimum.reduceat(keys[:n], starts) < _NEVER
            lengths = np.diff(np.append(starts, n))
            remains = (current[:n] != _GONE) & np.repeat(is_busy, lengths)
            left_over = np.add.reduceat(remains, starts, dtype=np.int64)[is_busy]
            place = place[remains]
            starts = np.cumsum(left_over) - left_over
        kept = result != _GONE
        counts = np.add.reduceat(kept, np.concatenate([[0], ends[:-1]]), dtype=np.int64)
        return result[kept], np.cumsum(counts)

    def _weigh(self, left: Symbols, right: Symbols, symbols: Symbols, keys: Symbols, merged: Symbols) -> None:
        """Set key and result of the pairs at `left`: the rank above the place. A symbol below 0 has no pairs."""
        one, other = symbols[left].astype(np.uint64), symbols[right].astype(np.uint64)
        entries = self._pairs.find(one << np.uint64(32) | other)
        if not len(self._merged):
            return
        keys[left] = np.where(entries >= 0, self._ranks[entries].astype(np.int64) << 32 | left, _NEVER)
        merged[left] = self._merged[entries]
