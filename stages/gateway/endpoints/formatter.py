"""What the endpoints' answers have in common: the protocol of a shape, usage, logprobs.

A shape belongs to one request and turns its record into JSON: events of a stream, or one whole body.
Most of an event never changes within a stream: shapes encode that once and, for each token, only its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from pipeline.errors import StarlingError
from stages.gateway.requests.state import RequestState, SequenceState

to_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have; as OpenAI has it


class ResponseFormatter(Protocol):
    """JSON of one request. Nothing here ends with a newline or contains one."""

    def opening(self) -> list[bytes]:
        """Events before the first text."""

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> bytes | None:
        """The event of `new` text and the output tokens [begin, end); None when there is nothing to say."""

    def ended(self, sequence: SequenceState) -> bytes:
        """The event with the finish reason."""

    def closing(self) -> list[bytes]:
        """Events after the last finish reason."""

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""


def error_json(error: StarlingError, cut: Iterable[int]) -> bytes:
    """The event of an error in the middle of a stream; `cut`: the choices that it ends."""
    reason = "timeout" if error.code == "TIMEOUT" else "error"
    return to_json({**error.body(), "choices": [{"index": index, "finish_reason": reason} for index in cut]})


def usage(request: RequestState) -> dict[str, Any]:
    """OpenAI's `usage`; prompts count once, whatever the number of choices."""
    prompt, completion = request.prompt_tokens, request.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
    }


def split(template: Any, *marks: str) -> list[bytes]:
    """`template` as JSON, cut where the strings `marks` stand in it, in their order."""
    rest, parts = to_json(template), []
    for mark in marks:
        before, found, rest = rest.partition(to_json(mark))
        if not found:
            raise ValueError(f"{mark!r} does not stand in the template")
        parts.append(before)
    return [*parts, rest]


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def token_text(piece: bytes) -> str:
    """A token's bytes as text; what is no whole character shows as U+FFFD."""
    return piece.decode("utf-8", "replace")


def token_key(piece: bytes) -> str:
    """A token's bytes as a name that no other token has: `bytes:\\xe2\\x80` for what is no text."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
