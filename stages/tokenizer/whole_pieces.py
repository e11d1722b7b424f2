"""Pieces that are tokens themselves, in vocabularies where such pieces are not merged.

Merges make the same token of nearly all of them.  So only pieces that merges have made several tokens of are looked up,
and what was found is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np
from numpy.typing import NDArray

from stages.tokenizer.word_cache import Ids, Steps, WordCache

Symbols = NDArray[np.int32]
Ends = NDArray[np.int64]


class WholePieces:
    """May be called in several threads.

    find: returns the tokens that pieces are, none of those that are no token.  longest: bytes of the longest token.
    """

    def __init__(self, find: Callable[[list[str]], dict[str, Ids]], longest: int) -> None:
        self._find, self._longest = find, longest
        self._cache = WordCache(self._compute)

    def _compute(self, pieces: list[str]) -> Steps:
        yield from ()  # `WordCache` expects steps; this is one
        return self._find(pieces)

    def put(self, merged: Symbols, merged_ends: Ends, text: str, ends: Ends) -> Generator[None, None, Symbols]:
        """Return merged symbols with one token in place of the symbols of pieces that are one; yields never.

        `merged_ends` and `ends`: where each piece ends, in symbols and in characters.
        """
        has_several = (np.diff(merged_ends, prepend=0) > 1) & (np.diff(ends, prepend=0) <= self._longest)
        places = np.flatnonzero(has_several)
        lasts = ends[places].tolist()
        firsts = np.where(places > 0, ends[places - 1], 0).tolist()
        pieces = list(map(text.__getitem__, map(slice, firsts, lasts)))
        known = yield from self._cache.find(pieces)
        parts: list[Symbols] = []
        at = 0
        for place, piece in zip(places.tolist(), pieces):
            if found := known[piece]:
                parts += [merged[at : int(merged_ends[place - 1]) if place else 0], np.array(found, np.int32)]
                at = int(merged_ends[place])
        return np.concatenate([*parts, merged[at:]]) if parts else merged
