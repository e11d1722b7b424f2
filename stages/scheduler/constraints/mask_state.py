"""What the scheduler stores about the token masks of one sequence, see constraints.py."""

from __future__ import annotations


class Masks:
    """The epoch of its masks, and its unanswered questions."""

    __slots__ = ("asked", "asked_at", "deadline", "deaths", "epoch", "has_drafts", "kept", "sent_at", "sent_length")

    def __init__(self) -> None:
        self.epoch = 0
        self.sent_length = -1  # tokens before the mask that was asked for last
        self.sent_at = 0.0
        self.asked: tuple[int, ...] = ()  # draft tokens
        self.asked_at = -1  # known tokens at that time
        self.kept = -1  # how many of them are allowed; -1: not known yet
        self.has_drafts = False  # masks of draft tokens may be in the row, with this epoch
        self.deadline = 0.0  # s; for the answer about draft tokens
        self.deaths = 0  # of the mask process while it worked for this sequence
