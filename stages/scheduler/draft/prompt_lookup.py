"""Prompt lookup: draft tokens from earlier occurrences of the last tokens, for text that repeats itself.

The last tokens of the sequence are searched among all earlier ones; the tokens that followed there are proposed.
"""

from __future__ import annotations

from array import array

from stages.scheduler.draft.text_source import TextSource

NGRAM = 3  # tokens that must have occurred before
SLICE = 1024  # tokens that one call enters: the thread publishes the steps of all models
MAX_ENTRIES = 8192  # of each of two indices, some 150 bytes each
_BITS = 21  # of a token id in a key; no vocabulary is larger


class PromptLookup(TextSource):
    """The source for one sequence. Each call enters `SLICE` tokens at most: new ones first, then earlier ones.

    A long prompt is entered from its end, in several calls.  When `_newer` is full it replaces `_older`, so that the
    last `MAX_ENTRIES` n-grams at least are found, and memory is bounded.
    """

    __slots__ = ("_begin", "_end", "_newer", "_older")

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._begin = self._end = 0  # the tokens between them have been entered
        self._newer: dict[int, int] = {}  # n-gram -> position after its last occurrence
        self._older: dict[int, int] = {}

    def _next(self, tokens: array[int], most: int) -> tuple[int, ...]:
        n = len(tokens)
        self._enter(tokens, n)
        if n < self.resume_at or n < NGRAM:
            return ()
        key = _key(tokens, n)
        at = self._newer.get(key) or self._older.get(key, 0)
        return tuple(tokens[at : at + most]) if at else ()

    def _enter(self, tokens: array[int], n: int) -> None:
        # The n-gram that ends at the last token is searched and not entered: it would find itself.
        if not self._end:
            self._begin = self._end = max(NGRAM, n - SLICE)
        elif n - self._end > SLICE:  # it was not called for so long: what lies between is left out
            self._end, self._begin = n - SLICE, NGRAM
        left = SLICE - max(0, n - self._end)
        for end in range(self._end, n):
            self._newer[_key(tokens, end)] = end
        self._end = max(self._end, n)
        if len(self._newer) >= MAX_ENTRIES:
            self._newer, self._older, self._begin = {}, self._newer, NGRAM
        for end in range(self._begin - 1, max(NGRAM, self._begin - left) - 1, -1):
            if len(self._older) >= MAX_ENTRIES:
                self._begin = NGRAM
                return
            self._older.setdefault(_key(tokens, end), end)
            self._begin = end


def _key(tokens: array[int], end: int) -> int:
    """The n-gram that ends before `end`, as one number: a third of the memory of a tuple."""
    first, second, third = tokens[end - NGRAM : end]
    return (first << _BITS | second) << _BITS | third
