"""Draft tokens by prompt lookup: text that repeats itself is guessed from what stands before.

The last tokens of the sequence are looked up among all earlier ones; what followed then is the draft.
The worker computes the draft's positions in one step and samples each with the token's own
random number; a draft token is accepted exactly if it equals the sample before it.  So output bytes
are those without speculation, and the sample behind the last accepted draft comes for free.

How much is drafted follows success (`Pace`, of each source of drafts one): it doubles when a whole draft is
accepted and halves when less than half is.  Drafts that fail one after the other buy silence for 2, 4, ...
256 tokens, so that free text pays next to nothing.
"""

from __future__ import annotations

from array import array

NGRAM = 3  # tokens that must have occurred before
FIRST = 4  # draft length to start with
SILENCE = 2  # tokens without drafting after a failure; doubles with each in a row
LONGEST_SILENCE = 256
RECENT = 16  # tokens after a draft in which another is likely


class Pace:
    """How much a source drafts for one sequence, and whether at all."""

    __slots__ = ("_silence", "length", "most", "tried", "until")

    def __init__(self, most: int) -> None:
        self.most = most
        self.length = min(FIRST, most)
        self.until = 0  # no drafts while fewer tokens are known
        self.tried = -RECENT  # tokens that were known at the last result
        self._silence = SILENCE

    def result(self, n_tokens: int, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` were right; `n_tokens` are known now."""
        self.tried = n_tokens
        if accepted == drafted:
            self.length = min(self.most, 2 * max(1, self.length))
            self._silence = SILENCE
        elif 2 * accepted < drafted:
            self.length = max(1, self.length // 2)
        if accepted == 0:
            self.until = n_tokens + self._silence
            self._silence = min(LONGEST_SILENCE, 2 * self._silence)
            self.length = min(FIRST, self.most)

    def is_idle(self, n_tokens: int) -> bool:
        """Nothing has been drafted for a while, or will be for one."""
        return n_tokens + RECENT <= self.until or n_tokens >= self.tried + RECENT


class Drafter(Pace):
    """Prompt lookup of one sequence. O(1) for each token that has become known since the last call."""

    __slots__ = ("_expected", "_index", "seen")

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.seen = 0  # tokens indexed
        self._index: dict[tuple[int, ...], int] = {}  # n-gram -> position behind its last occurrence
        self._expected = (-1, 0)  # where which token was expected when a step was held back for it

    def awaits(self, tokens: array[int]) -> bool:
        """Is it worth holding the next step back until the token after `tokens` is known?"""
        at = self._look_up(tokens)
        if not at:
            return False
        self._expected = (len(tokens), tokens[at])
        return True

    def draft(self, tokens: array[int], room: int) -> tuple[int, ...]:
        """What may follow `tokens`: at most `room` of them, () when there is no idea."""
        place, token = self._expected
        self._expected = (-1, 0)
        if 0 <= place < len(tokens) and tokens[place] != token:
            self.result(len(tokens), 1, 0)
        at = self._look_up(tokens)
        return tuple(tokens[at : at + min(room, self.length)]) if at else ()

    def _look_up(self, tokens: array[int]) -> int:
        """The position behind an earlier occurrence of the last tokens, 0: none, or in silence."""
        n = len(tokens)
        index = self._index
        # The n-gram that ends at the last token is looked up, not entered: it would find itself.
        for end in range(max(NGRAM, self.seen), n):
            index[tuple(tokens[end - NGRAM : end])] = end
        self.seen = max(self.seen, n)
        if n < self.until or n < NGRAM:
            return 0
        return index.get(tuple(tokens[n - NGRAM :]), 0)
