"""Tool calls and log probabilities, in OpenAI's form: what engines send with a piece of text, and of whole answers.

What an engine sends besides the members of that form is left out.  Pure.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeline.api.json_body import to_json
from pipeline.api.requests.tool_history import MAX_CALLS


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a call: its name, and the next characters of its arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of a call."""

    index: Annotated[int, Meta(ge=0, lt=MAX_CALLS)]
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta = FunctionDelta()


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens."""

    token: str
    logprob: float | None
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer."""

    token: str
    logprob: float | None
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of a chat."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float | None] | None] | None = None


Logprobs = ChatLogprobs | TextLogprobs


def read_calls(value: Any) -> tuple[CallDelta, ...]:
    """Calls of an event; () for null. Raises `msgspec.ValidationError`."""
    return msgspec.convert(value or [], tuple[CallDelta, ...])


def read_logprobs(value: Any, n_top: int, *, is_chat: bool) -> Logprobs | None:
    """Log probabilities of an event, None for null; of `n_top` tokens at each place. Raises `msgspec.ValidationError`.

    An engine may have been asked for more (llama-server gives none for 0).
    """
    if value is None:
        return None
    if not is_chat:
        return msgspec.convert(value, TextLogprobs)
    content = value.get("content")
    if not content:
        return None
    tokens = msgspec.convert(content, list[TokenLogprob])
    return ChatLogprobs([msgspec.structs.replace(one, top_logprobs=one.top_logprobs[:n_top]) for one in tokens])


class WholeChoice:
    """One choice of an answer that is not streamed."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._logprobs: dict[str, list[bytes]] = {}  # JSON of the elements, by the name of the array

    def add(self, text: str, calls: tuple[CallDelta, ...], logprobs: Logprobs | None) -> int:
        """Add what is new; the bytes that it takes in the answer, at most."""
        self._text.append(text)
        size = 6 * len(text)  # a character may be \\u1234
        for delta in calls:
            size += self._calls.setdefault(delta.index, _Call()).add(delta)
        if logprobs is not None:
            for name, values in msgspec.to_builtins(logprobs).items():
                if values:
                    elements = to_json(values)[1:-1]
                    size += len(elements)
                    self._logprobs.setdefault(name, []).append(elements)
        return size

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self._text)

    def message(self) -> dict[str, Any]:
        """Of a chat."""
        if not self._calls:
            return {"role": "assistant", "content": self.text}
        calls = [call.whole() for _, call in sorted(self._calls.items())]
        return {"role": "assistant", "content": self.text or None, "tool_calls": calls}

    def logprobs(self, form: type[Logprobs]) -> dict[str, Any]:
        """All of them."""
        names = msgspec.structs.fields(form)
        arrays = {one.name: self._logprobs.get(one.name, []) for one in names if one.name != "refusal"}
        found: dict[str, Any] = {name: msgspec.Raw(b"[" + b",".join(all) + b"]") for name, all in arrays.items()}
        return {**found, "refusal": None} if form is ChatLogprobs else found


class _Call:
    def __init__(self) -> None:
        self._id = self._name = ""
        self._arguments: list[str] = []

    def add(self, delta: CallDelta) -> int:
        self._id = self._id or delta.id or ""
        self._name = self._name or delta.function.name or ""
        arguments = delta.function.arguments or ""
        self._arguments.append(arguments)
        return 6 * (len(arguments) + len(delta.id or "") + len(delta.function.name or ""))

    def whole(self) -> dict[str, Any]:
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self._id, "type": "function", "function": function}
