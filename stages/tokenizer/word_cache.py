"""Results for words, such as their token ids, that are computed once and kept: for all kinds of vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import chain

CACHED_CHARACTERS = 256  # of a word whose ids are cached
MAX_CACHED = 1 << 16  # words
MAX_CACHED_IDS = 1 << 18  # of all cached words; with the words some 20 MB
MAX_ALL_CHARACTERS = 1 << 20  # of all cached words
Ids = tuple[int, ...]
Steps = Generator[None, None, dict[str, Ids]]


class WordCache:
    """Token ids of words. May be called in several threads.

    compute: returns the ids of words, all different; yields between steps.
    """

    def __init__(self, compute: Callable[[list[str]], Steps]) -> None:
        self._compute = compute
        self._cache: dict[str, Ids] = {}
        self._n_ids = self._n_characters = 0

    def find(self, words: Sequence[str]) -> Steps:
        """Return the ids of words and maybe of others. Yields between the steps of long ones."""
        cache = self._cache
        missing = set(words).difference(cache)
        if missing:
            found = yield from self._compute(list(missing))
            short = {word: ids for word, ids in found.items() if len(word) <= CACHED_CHARACTERS}
            n_ids, n_characters = sum(map(len, short.values())), sum(map(len, short))
            if (
                len(cache) + len(short) > MAX_CACHED
                or self._n_ids + n_ids > MAX_CACHED_IDS
                or self._n_characters + n_characters > MAX_ALL_CHARACTERS
            ):
                # Another thread may be reading the old one.
                cache = {word: cache[word] for word in words if word in cache} | found
                self.clear()
            else:
                self._n_ids += n_ids
                self._n_characters += n_characters
                cache |= short
                if len(short) < len(found):
                    cache = {word: found[word] if word in found else cache[word] for word in words}
        return cache

    def encode(self, words: Sequence[str]) -> Generator[None, None, list[int]]:
        """Return the ids of words one after the other. Yields as `find`."""
        try:
            return list(chain.from_iterable(map(self._cache.__getitem__, words)))
        except KeyError:
            found = yield from self.find(words)
        return list(chain.from_iterable(map(found.__getitem__, words)))

    def clear(self) -> None:
        """Forget all words."""
        self._cache, self._n_ids, self._n_characters = {}, 0, 0
