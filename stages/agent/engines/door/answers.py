"""Another engine's text as the events and bodies of our API.

Ids, times and the model's name follow from the request, so that the events of two engines are those of one answer.
"""

from __future__ import annotations

from typing import Any

from pipeline.api import sse
from pipeline.api.json_body import to_json
from pipeline.api.output_text import TextSoFar, comment
from pipeline.api.request_name import RequestName
from pipeline.api.requests.generation_request import GenerationRequest
from stages.agent.engines.door.event_stream import Piece


class Formatter:
    """One answer. `is_relayed`: the events go to an orchestrator, which needs the number of tokens."""

    def __init__(
        self,
        request: GenerationRequest,
        name: RequestName,
        created: int,
        so_far: TextSoFar | None,
        *,
        is_relayed: bool,
    ) -> None:
        self._request = request
        self._is_chat = request.messages is not None
        self._id = ("chatcmpl-" if self._is_chat else "cmpl-") + name.id.removeprefix("req-")
        self._created = created
        self._so_far = so_far
        self._is_relayed = is_relayed
        self._before = so_far.tokens if so_far is not None else 0
        self._text: list[str] = []
        self._tokens = self._before
        self._prompt_tokens = self._cached_tokens = 0
        self._reason = ""

    @property
    def has_ended(self) -> bool:
        """Whether the engine has said why the answer ends."""
        return bool(self._reason)

    def take(self, piece: Piece) -> None:
        """Add what an event says to the whole answer."""
        if not self._request.stream:
            self._text.append(piece.text)
        self._tokens = max(self._tokens, self._before + piece.tokens)
        self._prompt_tokens = piece.prompt_tokens or self._prompt_tokens
        self._cached_tokens = piece.cached_tokens or self._cached_tokens
        self._reason = piece.finish_reason or self._reason

    def end(self, reason: str) -> None:
        """It ends without another event of the engine."""
        self._reason = reason

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        text = "".join(self._text)
        part = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": self._reason}
        return to_json({**self._head("chat.completion"), "choices": [choice], "usage": self._usage()})

    def opening(self) -> bytes:
        """The first event of a stream; b"" if the client has it."""
        if not self._is_chat or self._so_far is not None:
            return b""
        return self._event({"role": "assistant", "content": ""})

    def event(self, piece: Piece) -> bytes:
        """The event of a text; b"" without one."""
        if not piece.text:
            return b""
        named = comment(self._tokens) if self._is_relayed else b""
        return named + self._event({"content": piece.text} if self._is_chat else {"text": piece.text})

    def closing(self) -> bytes:
        """The last events of a stream."""
        last = self._event({} if self._is_chat else {"text": ""}, self._reason)
        if self._request.include_usage:
            last += sse.event(to_json({**self._head(), "choices": [], "usage": self._usage()}))
        return (comment(self._tokens) if self._is_relayed else b"") + last + sse.DONE

    def _event(self, part: dict[str, Any], reason: str | None = None) -> bytes:
        shown = {"delta": part} if self._is_chat else part
        choice = {"index": 0, **shown, "finish_reason": reason}
        return sse.event(to_json({**self._head(), "choices": [choice]}))

    def _head(self, kind: str = "chat.completion.chunk") -> dict[str, Any]:
        kind = kind if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}

    def _usage(self) -> dict[str, Any]:
        # A successor counts the text so far as a part of its prompt.
        prompt = max(0, self._prompt_tokens - self._before)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._tokens,
            "prompt_tokens_details": {"cached_tokens": min(prompt, self._cached_tokens)},
            "completion_tokens": self._tokens,
        }
