"""Token ids of words, which are cached: what byte-level and SentencePiece BPE have in common.

A word is a text that no merge crosses the ends of.  Where the compiled kernel is stored, all words of a text are merged
in a row (`WordEncoder.merge`).  Otherwise those that are not cached are merged all at once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stages.tokenizer.kernels.compiled import LONGEST
from stages.tokenizer.pair_merger import PairMerger
from stages.tokenizer.word_cache import WordCache

_ONE_BY_ONE = 256  # symbols up to which merging words one by one is faster
_FEW = 48  # symbols of a word up to which a search of all pairs is faster than a heap
_LONG = 512  # symbols above which a heap is faster than a step for each merge


class Symbols(Protocol):
    """What a kind of vocabulary says of its symbols."""

    def whole(self, word: str) -> tuple[int, ...] | None:
        """Return the ids of a word that is not merged, None of others."""

    def split(self, words: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the symbols of all words, and the number of each word's."""

    def to_ids(self, symbols: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of a word's merged symbols."""


class WordEncoder:
    """Token ids of words. May be called in several threads."""

    def __init__(self, symbols: Symbols, merger: PairMerger) -> None:
        self._symbols, self._merger = symbols, merger
        self._cache = WordCache(self._encode)
        self._compiled = merger.compiled()

    @property
    def is_compiled(self) -> bool:
        """Whether `merge` can be called."""
        return self._compiled is not None

    def merge(
        self, symbols: NDArray[np.int32], ends: NDArray[np.int64]
    ) -> Generator[None, None, tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Merge words: their symbols in a row, and where each ends. Returns the same. Yields between the steps of long
        ones."""
        assert self._compiled is not None
        long = np.flatnonzero(np.diff(ends, prepend=0) > LONGEST).tolist()
        if not long:
            return self._compiled.merge(symbols, ends)
        parts, counts = [], []
        first, begin = 0, 0  # the word, and its first symbol
        for word in (*long, len(ends)):
            before = int(ends[word - 1]) if word else 0
            merged, merged_ends = self._compiled.merge(symbols[begin:before], ends[first:word] - begin)
            parts.append(merged)
            counts.append(np.diff(merged_ends, prepend=0))
            if word < len(ends):
                first, begin = word + 1, int(ends[word])
                found = yield from self._compiled.merge_long(symbols[before:begin])
                parts.append(found)
                counts.append(np.array([len(found)]))
        return np.concatenate(parts), np.cumsum(np.concatenate(counts))

    def encode(self, words: list[str]) -> Generator[None, None, list[int]]:
        """Return the ids of words one after the other. Yields between the steps of long ones."""
        return self._cache.encode(words)

    def _encode(self, words: list[str]) -> Generator[None, None, dict[str, tuple[int, ...]]]:
        found = {word: ids for word in words if (ids := self._symbols.whole(word)) is not None}
        rest = [word for word in words if word not in found] if found else words
        if not rest:
            return found
        symbols, counts = self._symbols.split(rest)
        ends = np.cumsum(counts)
        to_ids = self._symbols.to_ids
        if len(symbols) > _ONE_BY_ONE:
            is_long = counts > _LONG
            few = [word for word, skip in zip(rest, is_long) if not skip]
            if few:
                is_in = np.repeat(~is_long, counts)
                merged, merged_ends = self._merger.merge_all(symbols[is_in], np.cumsum(counts[~is_long]))
                flat, at = merged.tolist(), 0
                for word, end in zip(few, merged_ends.tolist()):
                    found[word] = to_ids(flat[at:end])
                    at = end
        for word, n, end in zip(rest, counts.tolist(), ends.tolist()):
            if word not in found:
                part = symbols[end - n : end].tolist()
                found[word] = to_ids(
                    self._merger.merge(part) if n <= _FEW else (yield from self._merger.merge_long(part))
                )
        return found
