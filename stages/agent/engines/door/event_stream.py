"""The events of another engine's stream, as pieces of its choices. Pure.

Whatever is not a part of the answer is an error.  Engines count the output tokens of each choice for itself, in its
events; vLLM's last event has their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from pipeline.errors import InvalidRequest, ModelUnavailable
from shm.decoding import DECODE_ERRORS
from stages.agent.engines.dialect import Dialect
from stages.agent.engines.door.answer_form import AnswerForm
from stages.agent.engines.door.answer_parts import CallDelta, Logprobs, read_calls, read_logprobs

MAX_EVENT_BYTES = 1 << 20
MAX_SAID = 500  # characters of an engine's error
REFUSALS = (400, 413, 422)  # statuses of a request that no engine of its kind takes
REASONS = ("stop", "length")
OF_CALLS = "tool_calls"  # the reason of an answer that ends with calls


class Piece(NamedTuple):
    """What an event says of one choice."""

    text: str = ""
    tokens: int = 0  # of the output so far, of all choices
    finish_reason: str = ""  # of `REASONS`, or `OF_CALLS`; "": it goes on
    prompt_tokens: int = 0  # 0: not said
    cached_tokens: int = 0  # of the prompt
    is_last: bool = False
    choice: int = 0  # its index
    calls: tuple[CallDelta, ...] = ()
    logprobs: Logprobs | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing for the client."""
        return not (self.text or self.calls or self.logprobs)


class EventStream:
    """One stream, cut into events."""

    def __init__(self, dialect: Dialect, form: AnswerForm) -> None:
        self._dialect = dialect
        self._form = form
        self._rest = b""
        self._counts = [0] * form.n_choices  # tokens of each
        self._total = 0  # of all, as the engine says
        self._last = 0  # the choice of the last event that has one
        self.is_over = False  # [DONE] has come

    def feed(self, data: bytes) -> Iterator[Piece]:
        """What the events that are complete say, one after the other. Raises `ModelUnavailable`, `InvalidRequest`."""
        *blocks, self._rest = (self._rest + data.replace(b"\r\n", b"\n")).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise self._nonsense(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data:") and not self.is_over:
                    yield from self._read(line[5:].strip())

    def _read(self, data: bytes) -> list[Piece]:
        if data == b"[DONE]":
            self.is_over = True
            return [Piece(tokens=self._tokens, is_last=True)]
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
        except DECODE_ERRORS:
            raise self._nonsense(repr(data[:80])) from None
        if "error" in event:
            error = event["error"]
            said = error.get("message") if isinstance(error, dict) else error
            if isinstance(error, dict) and error.get("code") in REFUSALS:  # of a schema that vLLM cannot compile
                raise InvalidRequest(f"{self._dialect.name} refuses the request: {str(said)[:MAX_SAID]}")
            raise ModelUnavailable(f"{self._dialect.name} has stopped with an error: {str(said)[:MAX_SAID]}")
        try:
            return self._pieces(event)
        except (msgspec.ValidationError, KeyError, TypeError, AttributeError, ValueError, IndexError):
            raise self._nonsense(repr(data[:80])) from None

    @property
    def _tokens(self) -> int:
        return max(self._total, sum(self._counts))

    def _pieces(self, event: dict[str, Any]) -> list[Piece]:
        choices = event.get("choices") or []
        self._count(event, choices)
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        piece = Piece(
            tokens=self._tokens,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )
        return [self._of_choice(piece, choice) for choice in choices] or [piece]

    def _count(self, event: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        tokens = self._dialect.tokens(event)
        if choices:
            self._last = self._index(choices[-1])
        if tokens is None:
            return
        if choices or self._dialect.counts_choices:
            self._counts[self._last] = max(self._counts[self._last], tokens)
        else:
            self._total = max(self._total, tokens)

    def _index(self, choice: dict[str, Any]) -> int:
        index = choice.get("index", 0)
        if not isinstance(index, int) or not 0 <= index < self._form.n_choices:
            raise ValueError
        return index

    def _of_choice(self, piece: Piece, choice: dict[str, Any]) -> Piece:
        form = self._form
        part = choice["delta"] if form.is_chat else choice
        text = part.get("content" if form.is_chat else "text") or ""
        if not isinstance(text, str):
            raise TypeError
        calls = read_calls(part.get("tool_calls"))
        # Text that is apart from the answer would be lost.
        if any(part.get(name) for name in ("reasoning_content", "reasoning", "function_call")):
            raise ValueError
        if calls and not form.has_calls:
            raise ValueError
        logprobs = None
        if form.has_logprobs:
            logprobs = read_logprobs(choice.get("logprobs"), form.n_top, is_chat=form.is_chat)
        reason = choice.get("finish_reason") or ""
        if reason and reason not in REASONS and not (reason == OF_CALLS and form.has_calls):
            raise ModelUnavailable(f"{self._dialect.name} has ended the answer with {str(reason)[:40]!r}")
        return piece._replace(
            text=text, finish_reason=reason, choice=self._index(choice), calls=calls, logprobs=logprobs
        )

    def _nonsense(self, what: str) -> ModelUnavailable:
        return ModelUnavailable(f"{self._dialect.name} sends what is no event of an answer: {what}")
