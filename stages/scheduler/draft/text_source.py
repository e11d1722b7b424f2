"""What the sources of draft tokens share that look them up in a text: how many they propose, and when they pause.

The worker computes the positions of the draft tokens in one step and samples each with that position's own random
number; a draft token is accepted exactly if it equals the sample before it.  So the output bytes are those without
speculation, and the sample after the last accepted draft token costs nothing extra.

The number of draft tokens follows their success (`DraftLength`, one for each source): it doubles when all are
accepted and halves when fewer than half are.  Failures in a row pause the source for 2, 4, ... 256 tokens, so that
text without repetitions loses next to nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

FIRST_LENGTH = 4  # draft tokens of the first proposal
FIRST_PAUSE = 2  # tokens without proposals after a failure; doubles with each further failure
MAX_PAUSE = 256
RECENT = 16  # tokens after a proposal within which another one is likely


class DraftLength:
    """How many tokens a source proposes for one sequence, and whether it is paused."""

    __slots__ = ("_pause", "length", "most", "resume_at", "tried_at")

    def __init__(self, most: int) -> None:
        self.most = most
        self.length = min(FIRST_LENGTH, most)
        self.resume_at = 0  # paused while fewer tokens are known
        self.tried_at = -RECENT  # known tokens at the last result
        self._pause = FIRST_PAUSE

    def record(self, n_tokens: int, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` tokens were accepted; `n_tokens` are known now."""
        self.tried_at = n_tokens
        if accepted == drafted:
            self.length = min(self.most, 2 * max(1, self.length))
            self._pause = FIRST_PAUSE
        elif 2 * accepted < drafted:
            self.length = max(1, self.length // 2)
        if accepted == 0:
            self.resume_at = n_tokens + self._pause
            self._pause = min(MAX_PAUSE, 2 * self._pause)
            self.length = min(FIRST_LENGTH, self.most)

    def is_idle(self, n_tokens: int) -> bool:
        """The source has proposed nothing for a while, or is paused for a while."""
        return n_tokens + RECENT <= self.resume_at or n_tokens >= self.tried_at + RECENT


class TextSource(DraftLength, ABC):
    """A source for one sequence. The time of a call is bounded, however many tokens are known."""

    __slots__ = ("_expected",)

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._expected = (-1, 0)  # (position, token) for which a step was delayed

    @abstractmethod
    def _next(self, tokens: array[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow `tokens`; (): none are known, or the source is paused."""

    def expects_match(self, tokens: array[int]) -> bool:
        """Whether delaying the next step pays until the token after `tokens` is known."""
        found = self._next(tokens, 1)
        if not found:
            return False
        self._expected = (len(tokens), found[0])
        return True

    def propose(self, tokens: array[int], room: int) -> tuple[int, ...]:
        """At most `room` tokens that may follow `tokens`; (): none are known, or the source is paused."""
        position, token = self._expected
        self._expected = (-1, 0)
        if 0 <= position < len(tokens) and tokens[position] != token:
            self.record(len(tokens), 1, 0)
        return self._next(tokens, min(room, self.length))
