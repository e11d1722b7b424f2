"""Prompt lookup: draft tokens from earlier occurrences of the last tokens, for text that repeats itself.

The last tokens of the sequence are searched among all earlier ones; the tokens that followed there are proposed.
"""

from __future__ import annotations

from array import array

from stages.scheduler.draft.text_source import TextSource

NGRAM = 3  # tokens that must have occurred before


class PromptLookup(TextSource):
    """The source for one sequence. O(1) for each token that has become known since the last call."""

    __slots__ = ("_index", "_indexed")

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._indexed = 0  # tokens
        self._index: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence

    def _next(self, tokens: array[int], most: int) -> tuple[int, ...]:
        n = len(tokens)
        index = self._index
        # The n-gram that ends at the last token is searched and not entered: it would find itself.
        for end in range(max(NGRAM, self._indexed), n):
            index[tuple(tokens[end - NGRAM : end])] = end
        self._indexed = max(self._indexed, n)
        if n < self.resume_at or n < NGRAM:
            return ()
        at = index.get(tuple(tokens[n - NGRAM :]), 0)
        return tuple(tokens[at : at + most]) if at else ()
