"""The answers of /v1/messages, in the form of Anthropic's API: content blocks, whole or as a stream of named events.

    message_start
    content_block_start, ping, content_block_delta ..., content_block_stop      for each block; a ping in the first
    message_delta, message_stop

Reasoning is a `thinking` block. Its signature is a digest of it: the API has one, and no client can check it.

A token can make several events, and a client may lose its connection between any two of them.  Therefore events are
counted in *units*: a character of a delta is one, and any other event too.  The number of units after an event does not
depend on how tokens or characters were grouped, so a stream can be continued from it.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec

from pipeline.api.error_response import anthropic_error
from pipeline.api.json_body import to_json
from pipeline.errors import StarlingError
from stages.gateway.endpoints.answer_parser import AnswerItem, ReasoningText, make_parser
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.tool_calls.call_parser import Arguments, CallBegin, CallEnd, Text

ID_PREFIX, CALL_PREFIX = "msg_", "toolu_"


class BlockEvent(NamedTuple):
    """An event of a stream. `units`: how many there are up to its end."""

    name: bytes
    data: bytes
    units: int


class MessageFormatter:
    """Formats the response of one request, which has one sequence."""

    opens_before_error = False  # Anthropic's API has its `error` at any place

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        self._request = request
        self._tools = request.spec.generation.tools
        self._parser = make_parser(request.spec.generation)
        self._is_whole = False  # all of the text has been parsed
        self._block = ""  # type of the open block; "": none is open
        self._thinking = hashlib.sha256()  # of the reasoning so far
        self._n_blocks = 0
        self._n_calls = 0
        self._units = 0
        self._received = 0  # units that the client has: their events are not made
        self._events: list[BlockEvent] = []

    # ---------------------------------------------------------------- a stream

    def opening_events(self) -> list[BlockEvent]:
        """Return the events before the first text; they are no units."""
        message = {**self._header(), "content": [], "stop_reason": None, "stop_sequence": None}
        start = {"type": "message_start", "message": {**message, "usage": self._usage(0)}}
        return [BlockEvent(b"message_start", to_json(start), 0)]

    def text_events(self, sequence: SequenceState, new: str) -> list[BlockEvent]:
        """Return the events of new text. A sequence that `is_flushed` has its last text."""
        self._add(self._parse(new, is_last=sequence.is_flushed))
        return self._take()

    def end_events(self, sequence: SequenceState) -> list[BlockEvent]:
        """Return the events at the end of the sequence."""
        self._add(self._parse("", is_last=True))
        self._close_block()
        delta = {"stop_reason": self._stop_reason(sequence), "stop_sequence": sequence.stop_string or None}
        self._event("message_delta", delta=delta, usage=self._usage(self._request.completion_tokens))
        return self._take()

    def closing_events(self) -> list[BlockEvent]:
        """Return the event that ends the message."""
        self._event("message_stop")
        return self._take()

    def kept(self) -> bytes:
        """Return b"": nothing is stored with the answer."""
        return b""

    def error_event(self, error: StarlingError) -> BlockEvent:
        """Return the event of an error, the last one."""
        return BlockEvent(b"error", to_json(anthropic_error(error, self._request.spec.client_id)), 0)

    def skip(self, text: str, *, is_whole: bool) -> None:
        """Count the events of `text`, from the beginning on, as sent. `is_whole`: it is all of the text."""
        self._add(self._parse(text, is_last=is_whole))
        self._take()

    def skip_units(self, units: int) -> None:
        """Make no events up to the unit `units`."""
        self._received = units

    # ---------------------------------------------------------------- a whole response

    def whole_response(self) -> bytes:
        """Return the body of a response that is not streamed."""
        (sequence,) = self._request.sequences
        content: list[dict[str, Any]] = []
        for item in self._parse("".join(sequence.text), is_last=True):
            if isinstance(item, Text):
                if not content or content[-1]["type"] != "text":
                    content.append({"type": "text", "text": ""})
                content[-1]["text"] += item.text
            elif isinstance(item, ReasoningText):
                if not content:
                    content.append({"type": "thinking", "thinking": ""})
                content[-1]["thinking"] += item.text
                content[-1]["signature"] = self._sign(item.text)
            elif isinstance(item, CallBegin):
                content.append(self._call_block(item.name))
            elif isinstance(item, CallEnd):
                content[-1]["input"] = msgspec.Raw(item.closed.encode("utf-8", "surrogatepass"))
        return to_json(
            {
                **self._header(),
                "content": content,
                "stop_reason": self._stop_reason(sequence),
                "stop_sequence": sequence.stop_string or None,
                "usage": self._usage(self._request.completion_tokens),
            }
        )

    # ----------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        spec = self._request.spec
        return {"id": f"{ID_PREFIX}{spec.hex}", "type": "message", "role": "assistant", "model": spec.shown_model}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        cached = self._request.cached_tokens
        return {
            "input_tokens": self._request.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }

    def _stop_reason(self, sequence: SequenceState) -> str:
        if sequence.finish_reason == "length":
            wanted = self._request.spec.generation.max_tokens or 0
            return "model_context_window_exceeded" if sequence.spec.max_tokens < wanted else "max_tokens"
        if sequence.stop_string:
            return "stop_sequence"
        return "tool_use" if self._n_calls else "end_turn"

    def _call_block(self, name: str) -> dict[str, Any]:
        call_id = self._tools.call_id(CALL_PREFIX, 0, self._n_calls) if self._tools else ""
        self._n_calls += 1
        return {"type": "tool_use", "id": call_id, "name": name, "input": {}}

    def _sign(self, text: str) -> str:
        """The signature of the reasoning up to `text`."""
        self._thinking.update(text.encode())
        return self._thinking.hexdigest()

    def _parse(self, new: str, *, is_last: bool) -> list[AnswerItem]:
        if self._parser is None:
            return [Text(new)] if new else []
        items = self._parser.feed(new) if not self._is_whole else []
        if is_last and not self._is_whole:
            self._is_whole = True
            items += self._parser.finish()
        return items

    def _add(self, items: list[AnswerItem]) -> None:
        for item in items:
            if isinstance(item, Text):
                if self._block != "text":
                    self._open_block({"type": "text", "text": ""})
                self._delta("text_delta", "text", item.text)
            elif isinstance(item, ReasoningText):
                if self._block != "thinking":
                    self._open_block({"type": "thinking", "thinking": "", "signature": ""})
                self._delta("thinking_delta", "thinking", item.text)
                self._sign(item.text)
            elif isinstance(item, CallBegin):
                self._open_block(self._call_block(item.name))
            elif isinstance(item, Arguments):
                self._delta("input_json_delta", "partial_json", item.text)
            else:
                self._close_block()

    def _open_block(self, block: dict[str, Any]) -> None:
        self._close_block()
        self._block = block["type"]
        self._event("content_block_start", index=self._n_blocks, content_block=block)
        if not self._n_blocks:
            self._event("ping")
        self._n_blocks += 1

    def _close_block(self) -> None:
        if self._block == "thinking":
            delta = {"type": "signature_delta", "signature": self._sign("")}
            self._event("content_block_delta", index=self._n_blocks - 1, delta=delta)
        if self._block:
            self._event("content_block_stop", index=self._n_blocks - 1)
        self._block = ""

    def _delta(self, kind: str, field: str, text: str) -> None:
        begin = self._units
        self._units += len(text)
        text = text[max(0, self._received - begin) :]
        if text:
            delta = {"type": kind, field: text}
            data = {"type": "content_block_delta", "index": self._n_blocks - 1, "delta": delta}
            self._events.append(BlockEvent(b"content_block_delta", to_json(data), self._units))

    def _event(self, name: str, **fields: Any) -> None:
        self._units += 1
        if self._units > self._received:
            self._events.append(BlockEvent(name.encode(), to_json({"type": name, **fields}), self._units))

    def _take(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events
