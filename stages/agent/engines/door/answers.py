"""Another engine's pieces of an answer as the events and bodies of our API.

Ids, times and the model's name follow from the request, so that the events of two engines are those of one answer.
"""

from __future__ import annotations

from typing import Any

from pipeline.api import sse
from pipeline.api.error_response import error_event
from pipeline.api.json_body import to_json
from pipeline.api.output_text import TextSoFar, comment
from pipeline.api.request_name import RequestName
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.errors import StarlingError
from stages.agent.engines.door.answer_form import AnswerForm
from stages.agent.engines.door.answer_parts import ChatLogprobs, TextLogprobs, WholeChoice
from stages.agent.engines.door.event_stream import OF_CALLS, Piece


class Formatter:
    """One answer. `is_relayed`: the events go to an orchestrator, which needs the number of tokens."""

    def __init__(
        self,
        request: GenerationRequest,
        name: RequestName,
        created: int,
        so_far: TextSoFar | None,
        form: AnswerForm,
        *,
        is_relayed: bool,
    ) -> None:
        self._request = request
        self._form = form
        self._is_chat = form.is_chat
        self._id = ("chatcmpl-" if self._is_chat else "cmpl-") + name.id.removeprefix("req-")
        self._created = created
        self._so_far = so_far
        self._is_relayed = is_relayed
        self._before = so_far.tokens if so_far is not None else 0
        self._choices = [WholeChoice() for _ in range(form.n_choices)]  # of an answer that is not streamed
        self.n_kept = 0  # bytes of it, at most
        self._tokens = self._before
        self._prompt_tokens = self._cached_tokens = 0
        self._reasons = [""] * form.n_choices
        self._have_calls = [False] * form.n_choices

    @property
    def has_ended(self) -> bool:
        """Whether the engine has said why each choice ends."""
        return all(self._reasons)

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can go on from its text."""
        return not self._form.fixed_by

    def take(self, piece: Piece) -> None:
        """Add what an event says to the whole answer."""
        if not self._request.stream:
            self.n_kept += self._choices[piece.choice].add(piece.text, piece.calls, piece.logprobs)
        self._tokens = max(self._tokens, self._before + piece.tokens)
        self._prompt_tokens = piece.prompt_tokens or self._prompt_tokens
        self._cached_tokens = piece.cached_tokens or self._cached_tokens
        self._have_calls[piece.choice] |= bool(piece.calls)
        reason = piece.finish_reason or self._reasons[piece.choice]
        # Of a call that was forced by its name vLLM says that the model stopped.
        self._reasons[piece.choice] = OF_CALLS if reason == "stop" and self._have_calls[piece.choice] else reason

    def end(self, reason: str) -> None:
        """It ends without another event of the engine."""
        self._reasons = [reason]

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return to_json({**self._head("chat.completion"), "choices": choices, "usage": self._usage()})

    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        part = {"message": choice.message()} if self._is_chat else {"text": choice.text}
        form = ChatLogprobs if self._is_chat else TextLogprobs
        logprobs = choice.logprobs(form) if self._form.has_logprobs else None
        return {"index": index, **part, "logprobs": logprobs, "finish_reason": self._reasons[index]}

    def opening(self) -> bytes:
        """The first events of a stream; b"" if the client has them."""
        if not self._is_chat or self._so_far is not None:
            return b""
        begin = {"role": "assistant", "content": ""}
        return b"".join([self._event({"index": index, "delta": begin}) for index in range(self._form.n_choices)])

    def event(self, piece: Piece) -> bytes:
        """The event of a piece; b"" if it has nothing for the client."""
        if piece.is_empty:
            return b""
        if self._is_chat:
            delta: dict[str, Any] = {"content": piece.text} if piece.text or not piece.calls else {}
            shown: dict[str, Any] = {"delta": {**delta, "tool_calls": piece.calls} if piece.calls else delta}
        else:
            shown = {"text": piece.text}
        if self._form.has_logprobs:
            shown["logprobs"] = piece.logprobs
        named = comment(self._tokens) if self._is_relayed else b""
        return named + self._event({"index": piece.choice, **shown})

    def closing(self) -> bytes:
        """The last events of a stream."""
        part: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        last = b"".join([self._event({"index": index, **part}, why) for index, why in enumerate(self._reasons)])
        if self._request.include_usage:
            last += sse.event(to_json({**self._head(), "choices": [], "usage": self._usage()}))
        return (comment(self._tokens) if self._is_relayed else b"") + last + sse.DONE

    def failure(self, error: StarlingError) -> bytes:
        """The last event of a stream that fails."""
        return sse.event(error_event(error, [index for index, why in enumerate(self._reasons) if not why]))

    def _event(self, choice: dict[str, Any], reason: str | None = None) -> bytes:
        return sse.event(to_json({**self._head(), "choices": [{**choice, "finish_reason": reason}]}))

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
