"""Draft tokens from the text that the client predicts (`prediction`), where the output has come to in it."""

from __future__ import annotations

from array import array

from pipeline.predicted_text import PredictionFollower
from stages.scheduler.draft.text_source import TextSource


class Prediction(TextSource):
    """The source for one sequence."""

    __slots__ = ("_follower", "_prompt_len")

    def __init__(self, most: int, prediction: bytes, prompt_len: int) -> None:
        """`prediction`: token ids, i32 little-endian; `prompt_len`: tokens before the output."""
        super().__init__(most)
        self._follower = PredictionFollower(prediction)
        self._prompt_len = prompt_len
        self.tried_at = prompt_len  # the first tokens are likely to be predicted

    def _next(self, tokens: array[int], most: int) -> tuple[int, ...]:
        follower = self._follower
        follower.follow(tokens, self._prompt_len, len(tokens) - self._prompt_len)
        return follower.expected(most) if len(tokens) >= self.resume_at else ()
