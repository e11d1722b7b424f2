"""Prompt scores: which tokens of a sequence's prompt still need their log probability, and which step computes it.

A token is scored at the position before it, so the first token of a prompt has no score.  Scores leave as soon as
their step is acknowledged, in order; a sequence that is preempted, or continued by another scheduler, scores only the
rest.  The positions that score are always computed: kv may share pages only before the first of them.
"""

from __future__ import annotations


class PromptScores:
    """The scores of one prompt.

    `top`: highest log probabilities beside each; `scored`: leading tokens of the prompt that need no score any more,
    the first one included; `n_tokens`: of the prompt.
    """

    __slots__ = ("n_tokens", "scored", "top")

    def __init__(self, top: int, n_tokens: int, scored: int) -> None:
        self.top = top
        self.n_tokens = n_tokens
        self.scored = max(1, scored)

    @property
    def is_complete(self) -> bool:
        """All tokens are scored."""
        return self.scored >= self.n_tokens

    @property
    def sharable(self) -> int:
        """Leading positions that need not be computed for the scores that are left."""
        return self.n_tokens if self.is_complete else self.scored - 1

    def part(self, start: int, count: int) -> tuple[int, int]:
        """Of the positions start .. start + count - 1: the first one that scores a token, and how many do.

        They follow each other up to the end of the part, or of the prompt.
        """
        first = max(start, self.scored - 1)
        return first, max(0, min(start + count, self.n_tokens - 1) - first)

    def longest(self, start: int, spare: int) -> int:
        """The most positions from `start` on of which at most `spare` score a token: a large number if all may."""
        last = max(start, self.scored - 1) + spare
        return last - start if last < self.n_tokens - 1 else 1 << 60
