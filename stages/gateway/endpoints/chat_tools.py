"""The answers of chats with tools or reasoning, in OpenAI's form: fields beside `content`, whole or as deltas.

Reasoning is `reasoning_content`, as of DeepSeek's API and llama-server, and `reasoning`, as of vLLM and OpenRouter.

An event has everything that became certain with its tokens: reasoning, text, the beginnings of calls (id, type, name),
and more of their arguments.  So each position of a stream has one event, and a client that resumes there has all
before it.
"""

from __future__ import annotations

from typing import Any

from pipeline.api.json_body import to_json
from stages.gateway.endpoints.answer_parser import AnswerItem, AnswerParser, ReasoningText, make_parser
from stages.gateway.endpoints.chat_formatter import ChatFormatter
from stages.gateway.endpoints.response_formatter import ResponseFormatter
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.tool_calls.call_parser import Arguments, CallBegin, CallEnd, Text

ID_PREFIX = "call_"


def make_formatter(request: RequestState, vocabulary: TokenBytes) -> ResponseFormatter:
    """Return the formatter of a chat."""
    parsers = [make_parser(request.spec.generation) for _ in request.sequences]
    if parsers[0] is None:
        return ChatFormatter(request, vocabulary)
    return ParsedChatFormatter(request, vocabulary, parsers)


class ParsedChatFormatter(ChatFormatter):
    """`chat.completion` and `chat.completion.chunk` of a request that has tools, or a model that thinks."""

    def __init__(self, request: RequestState, vocabulary: TokenBytes, parsers: list[AnswerParser | None]) -> None:
        super().__init__(request, vocabulary)
        self._tools = request.spec.generation.tools
        self._parsers = parsers  # None: at its end
        self._n_calls = [0] * len(request.sequences)

    def text_event(self, sequence: SequenceState, new: str, begin: int, end: int) -> bytes | None:
        """See `ResponseFormatter`. With logprobs also tokens whose text is held back have an event."""
        items = self._parse(sequence, new, is_last=sequence.is_flushed)
        items = [item for item in items if not isinstance(item, CallEnd)]  # no delta shows it
        content = [item.text for item in items if isinstance(item, Text)]
        if len(content) == len(items):
            return super().text_event(sequence, "".join(content), begin, end)
        logprobs = self._logprobs(sequence, begin, end) if sequence.logprobs else None
        return self._delta_event(sequence, items, logprobs)

    def rest_event(self, sequence: SequenceState) -> bytes | None:
        """See `ResponseFormatter`."""
        items = self._parse(sequence, "", is_last=True)
        return self._delta_event(sequence, items, None) if items else None

    def skip(self, sequence: SequenceState, text: str, end: int, *, is_whole: bool) -> None:
        """See `ResponseFormatter`."""
        self._deltas(sequence, self._parse(sequence, text, is_last=is_whole))

    def _parse(self, sequence: SequenceState, new: str, *, is_last: bool) -> list[AnswerItem]:
        parser = self._parsers[sequence.index]
        if parser is None:
            return []
        items = parser.feed(new)
        if is_last:
            items += parser.finish()
            self._parsers[sequence.index] = None
        return items

    def _delta_event(self, sequence: SequenceState, items: list[AnswerItem], logprobs: Any) -> bytes | None:
        delta = self._deltas(sequence, items)
        if not delta:
            return None
        return to_json(self._event({"index": sequence.index, "delta": delta}, logprobs))

    def _deltas(self, sequence: SequenceState, items: list[AnswerItem]) -> dict[str, Any]:
        """Return a delta with all of the items, and count the calls."""
        reasoning = "".join(item.text for item in items if isinstance(item, ReasoningText))
        content = "".join(item.text for item in items if isinstance(item, Text))
        calls: list[dict[str, Any]] = []
        for item in items:
            if isinstance(item, CallBegin):
                calls.append(self._call(sequence, self._n_calls[sequence.index], item.name))
                self._n_calls[sequence.index] += 1
            elif isinstance(item, Arguments):
                if not calls:
                    calls.append({"index": self._n_calls[sequence.index] - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += item.text
        delta: dict[str, Any] = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
        if content:
            delta["content"] = content
        return {**delta, "tool_calls": calls} if calls else delta

    def _call(self, sequence: SequenceState, index: int, name: str) -> dict[str, Any]:
        name_of = self._tools.call_id(ID_PREFIX, sequence.index, index) if self._tools else ""
        return {"index": index, "id": name_of, "type": "function", "function": {"name": name, "arguments": ""}}

    def _finish_reason(self, sequence: SequenceState) -> str:
        has_calls = self._n_calls[sequence.index] > 0
        return "tool_calls" if has_calls and sequence.finish_reason == "stop" else sequence.finish_reason

    def _whole_part(self, sequence: SequenceState) -> dict[str, Any]:
        parser = make_parser(self._request.spec.generation)
        assert parser is not None
        self._n_calls[sequence.index] = 0
        delta = self._deltas(sequence, parser.feed("".join(sequence.text)) + parser.finish())
        calls = delta.pop("tool_calls", [])
        for call in calls:
            del call["index"]
        content = delta.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **delta}
        return {"index": sequence.index, "message": {**message, "tool_calls": calls} if calls else message}
