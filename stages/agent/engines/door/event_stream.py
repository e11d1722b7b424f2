"""The events of another engine's stream, as text. Pure; whatever is not a part of one answer is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from pipeline.errors import ModelUnavailable
from shm.decoding import DECODE_ERRORS
from stages.agent.engines.dialect import Dialect

MAX_EVENT_BYTES = 1 << 20
REASONS = ("stop", "length")


class Piece(NamedTuple):
    """What an event says."""

    text: str = ""
    tokens: int = 0  # of the output so far
    finish_reason: str = ""  # of `REASONS`; "": it goes on
    prompt_tokens: int = 0  # 0: not said
    cached_tokens: int = 0  # of the prompt
    is_last: bool = False


class EventStream:
    """One stream, cut into events."""

    def __init__(self, dialect: Dialect, *, is_chat: bool) -> None:
        self._dialect = dialect
        self._is_chat = is_chat
        self._rest = b""
        self._tokens = 0
        self.is_over = False  # [DONE] has come

    def feed(self, data: bytes) -> Iterator[Piece]:
        """What the events that are complete say, one after the other. Raises `ModelUnavailable`."""
        *blocks, self._rest = (self._rest + data.replace(b"\r\n", b"\n")).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise self._nonsense(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data:") and not self.is_over:
                    yield self._read(line[5:].strip())

    def _read(self, data: bytes) -> Piece:
        if data == b"[DONE]":
            self.is_over = True
            return Piece(tokens=self._tokens, is_last=True)
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
        except DECODE_ERRORS:
            raise self._nonsense(repr(data[:80])) from None
        if "error" in event:
            error = event["error"]
            said = error.get("message") if isinstance(error, dict) else error
            raise ModelUnavailable(f"{self._dialect.name} has stopped with an error: {str(said)[:300]}")
        try:
            return self._piece(event)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError):
            raise self._nonsense(repr(data[:80])) from None

    def _piece(self, event: dict[str, Any]) -> Piece:
        tokens = self._dialect.tokens(event)
        if tokens is not None and tokens >= self._tokens:
            self._tokens = tokens
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        piece = Piece(
            tokens=self._tokens,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )
        choices = event.get("choices", [])
        if not choices:
            return piece
        (choice,) = choices
        part = choice["delta"] if self._is_chat else choice
        text = part.get("content" if self._is_chat else "text") or ""
        if not isinstance(text, str):
            raise TypeError
        # Text that is apart from the answer would be lost.
        if any(part.get(name) for name in ("reasoning_content", "reasoning", "tool_calls", "function_call")):
            raise ValueError
        reason = choice.get("finish_reason") or ""
        if reason and reason not in REASONS:
            raise ModelUnavailable(f"{self._dialect.name} has ended the answer with {str(reason)[:40]!r}")
        return piece._replace(text=text, finish_reason=reason)

    def _nonsense(self, what: str) -> ModelUnavailable:
        return ModelUnavailable(f"{self._dialect.name} sends what is no event of an answer: {what}")
