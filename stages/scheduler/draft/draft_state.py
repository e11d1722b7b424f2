"""What the proposer stores about one sequence: its two sources of draft tokens, and how successful they are."""

from __future__ import annotations

from stages.scheduler.draft.draft_sequence import DraftSequence
from stages.scheduler.draft.prompt_lookup import DraftLength, PromptLookup


class DraftState:
    """The sources of one sequence."""

    __slots__ = ("asked_at", "booked_s", "deadline", "draft", "is_model", "lookup", "model_length")

    def __init__(self, most: int) -> None:
        """`most`: draft tokens in one step."""
        self.lookup = PromptLookup(most)
        self.model_length = DraftLength(most)
        self.draft: DraftSequence | None = None  # on the draft model
        self.is_model = False  # the draft tokens that are being verified came from the draft model
        self.asked_at = 0  # known tokens when the draft model was asked last
        self.deadline = 0.0  # s; the target waits for draft tokens until then
        self.booked_s = 0.0  # part of `draft.spent_s` that is on the account
