"""What the proposer stores about one sequence: its sources of draft tokens, and how successful they are."""

from __future__ import annotations

from array import array

from stages.scheduler.draft.draft_sequence import DraftSequence
from stages.scheduler.draft.prediction import Prediction
from stages.scheduler.draft.prompt_lookup import PromptLookup
from stages.scheduler.draft.text_source import DraftLength, TextSource


class DraftState:
    """The sources of one sequence."""

    __slots__ = ("asked_at", "booked_s", "deadline", "draft", "is_model", "model_length", "suspicion", "text", "texts")

    def __init__(self, most: int, prediction: bytes = b"", prompt_len: int = 0) -> None:
        """`most`: draft tokens in one step; `prediction`: of the client, token ids, b"": none."""
        self.texts: list[TextSource] = [PromptLookup(most)]  # the first one that knows what follows proposes it
        if prediction:
            self.texts.insert(0, Prediction(most, prediction, prompt_len))
        self.text = self.texts[0]  # that has proposed last
        self.model_length = DraftLength(most)
        self.draft: DraftSequence | None = None  # on the draft model
        self.is_model = False  # the draft tokens that are being verified came from the draft model
        self.asked_at = 0  # known tokens when the draft model was asked last
        self.deadline = 0.0  # s; the target waits for draft tokens until then
        self.booked_s = 0.0  # part of `draft.spent_s` that is on the account
        self.suspicion = 0  # of all its draft sequences: workers of the draft model have ended in their steps

    def is_idle(self, n_tokens: int) -> bool:
        """No text has proposed anything for a while, or is likely to do so soon."""
        return all(text.is_idle(n_tokens) for text in self.texts)

    def expects_match(self, tokens: array[int]) -> bool:
        """See `TextSource`."""
        return any(text.expects_match(tokens) for text in self.texts)

    def propose(self, tokens: array[int], room: int) -> tuple[int, ...]:
        """What the texts propose, see `TextSource`."""
        for text in self.texts:
            found = text.propose(tokens, room)
            if found:
                self.text = text
                return found
        return ()
