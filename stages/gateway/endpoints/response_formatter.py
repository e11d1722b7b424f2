"""Response formatters: from the state of a request to JSON, as the events of a stream or as one whole body.

One formatter serves one request.  This module has the interface and what all formatters share; `openai_formatter.py`
has what the two endpoints of OpenAI's API share.
"""

from __future__ import annotations

import codecs
from typing import Any, Protocol

import msgspec

from stages.gateway.requests.state import RequestState, SequenceState

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have; as in OpenAI's API


class ResponseFormatter(Protocol):
    """JSON of one request, each result without a newline.

    Events come in the order of the methods; those of several sequences may alternate.  `text_event` with a sequence
    that `is_flushed` has its last text.
    """

    def opening_events(self) -> list[bytes]:
        """Return the events before the first text."""

    def text_event(self, sequence: SequenceState, new: str, begin: int, end: int) -> bytes | None:
        """Return the event of `new` text and the output tokens [begin, end); None if it would be empty."""

    def rest_event(self, sequence: SequenceState) -> bytes | None:
        """Return the event of text that was held back until the end of the sequence; None: there is none."""
        return None

    def skip(self, sequence: SequenceState, text: str, end: int, *, is_whole: bool) -> None:
        """Count `text`, from the beginning on, and the output tokens before `end` as sent. `is_whole`: it is all."""
        return

    async def prepare(self, sequence: SequenceState, begin: int) -> None:
        """Do what takes long of the next event of a sequence, or of its part of a whole response: other streams go on.

        begin: the output token from which on they are.
        """
        return

    def finish_event(self, sequence: SequenceState) -> bytes:
        """Return the event with the finish reason of a sequence."""

    def closing_events(self) -> list[bytes]:
        """Return the events after the last finish reason."""

    def whole_response(self) -> bytes:
        """Return the body of a response that is not streamed."""


def usage(request: RequestState) -> dict[str, Any]:
    """Return OpenAI's `usage`. A prompt counts once, for any number of choices."""
    prompt, completion = request.prompt_tokens, request.completion_tokens
    details: dict[str, int] = {}
    if request.spec.generation.reasoning:
        details["reasoning_tokens"] = request.reasoning_tokens
    if request.spec.generation.prediction is not msgspec.UNSET:
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = request.predicted
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        **({"completion_tokens_details": details} if details else {}),
    }


def finite_logprob(logprob: float) -> float:
    """Return `logprob`, or `MIN_LOGPROB` if it is lower."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def token_text(piece: bytes) -> str:
    """Return a token's bytes as text, with U+FFFD for incomplete characters."""
    return piece.decode("utf-8", "replace")


def token_key(piece: bytes) -> str:
    """Return a token's bytes as a name unique in the vocabulary: `bytes:\\xe2\\x80` for bytes that are not UTF-8."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class TextOffsets:
    """Where the tokens of a text begin in it, in characters.

    A token that begins within a character has the place of that character, which the text shows when it is complete.
    """

    def __init__(self, begin: int = 0) -> None:
        self._at = begin
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, piece: bytes) -> int:
        """Return where the next token begins; `piece`: its bytes, b"" if the text does not show it."""
        found = self._at
        self._at += len(self._utf8.decode(piece))
        return found
