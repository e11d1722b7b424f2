"""The answers of /v1/responses, in the form of OpenAI's API: output items, whole or as a stream of named events.

    response.created, response.in_progress
    response.output_item.added, ..., response.output_item.done                          for each item; in between
        response.content_part.added, response.output_text.delta ..., response.output_text.done,
            response.content_part.done                                                  of a message
        response.content_part.added, response.reasoning_text.delta ..., response.reasoning_text.done,
            response.content_part.done                                                  of reasoning
        response.function_call_arguments.delta ..., response.function_call_arguments.done   of a call
    response.completed | response.incomplete | response.failed

Events are counted in units, as those of `message_formatter.py`: a character of a delta is one, and any other event too.
The `sequence_number` of an event is the number of units up to its end, so that it does not depend on how tokens or
characters were grouped, and a stream can be continued after it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.api.json_body import to_json
from pipeline.api.requests.generation_request import ResponseFields
from pipeline.api.response_context import KeptResponse, encode_kept
from pipeline.api.response_object import answer_message, inputs_json, make_response
from pipeline.errors import StarlingError
from stages.gateway.endpoints.answer_parser import AnswerItem, ReasoningText, make_parser
from stages.gateway.endpoints.chat_tools import ID_PREFIX as CALL_PREFIX
from stages.gateway.endpoints.message_formatter import BlockEvent
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.tool_calls.call_parser import Arguments, CallBegin, CallEnd, Text

CREATED, IN_PROGRESS = 0, 1  # sequence numbers; those of units follow


class _OutputItem:
    """An output item as it grows."""

    def __init__(self, kind: str, item_id: str, name: str = "", call_id: str = "") -> None:
        self.kind = kind  # "message", "reasoning" or "function_call"
        self.id = item_id
        self.name = name
        self.call_id = call_id
        self.parts: list[str] = []  # text, or arguments
        self.is_complete = False  # of a call: its arguments are whole

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def shown(self, status: str, *, is_new: bool = False) -> dict[str, Any]:
        """The item as clients see it."""
        if self.kind == "message":
            content = [] if is_new else [self.part(self.text)]
            return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}
        if self.kind == "reasoning":
            content = [] if is_new else [self.part(self.text)]
            return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }

    def part(self, text: str) -> dict[str, Any]:
        """The content of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Items:
    """The output items of a text."""

    def __init__(self, request: RequestState) -> None:
        self._hex = request.spec.hex
        self._tools = request.spec.generation.tools
        self._n_calls = 0
        self.all: list[_OutputItem] = []

    def message(self) -> _OutputItem:
        """Begin a message."""
        return self._add(_OutputItem("message", f"msg_{self._hex}{len(self.all):03d}"))

    def reasoning(self) -> _OutputItem:
        """Begin reasoning."""
        return self._add(_OutputItem("reasoning", f"rs_{self._hex}{len(self.all):03d}"))

    def call(self, name: str) -> _OutputItem:
        """Begin a call."""
        call_id = self._tools.call_id(CALL_PREFIX, 0, self._n_calls) if self._tools else ""
        self._n_calls += 1
        return self._add(_OutputItem("function_call", f"fc_{self._hex}{len(self.all):03d}", name, call_id))

    def _add(self, item: _OutputItem) -> _OutputItem:
        self.all.append(item)
        return item


def _output_items(request: RequestState) -> list[_OutputItem]:
    """The items of the text so far."""
    (sequence,) = request.sequences
    items, text = _Items(request), "".join(sequence.text)
    parser = make_parser(request.spec.generation)
    found: list[AnswerItem] = parser.feed(text) if parser is not None else [Text(text)] if text else []
    if parser is not None and sequence.is_flushed:
        found += parser.finish()
    for item in found:
        if isinstance(item, Text):
            if not items.all or items.all[-1].kind != "message":
                items.message()
            items.all[-1].parts.append(item.text)
        elif isinstance(item, ReasoningText):
            if not items.all:
                items.reasoning()
            items.all[-1].parts.append(item.text)
        elif isinstance(item, CallBegin):
            items.call(item.name)
        elif isinstance(item, Arguments):
            items.all[-1].parts.append(item.text)
        else:
            items.all[-1].is_complete = item.is_complete
    is_bare = not items.all or (items.all[-1].kind == "reasoning" and sequence.finish_reason == "stop")
    if is_bare and sequence.phase is SequencePhase.FINISHED:
        items.message()  # an answer without text
    return items.all


def response_object(request: RequestState, status: str = "") -> dict[str, Any]:
    """Return the response as it is now. `status`: instead of the one that follows from the request."""
    (sequence,) = request.sequences
    spec = request.spec
    fields = spec.generation.response or ResponseFields()
    is_cut = sequence.finish_reason == "length"
    status = status or _status(request, is_cut)
    is_over = status in ("completed", "incomplete")
    output = _output_items(request) if status != "queued" else []
    return make_response(
        fields,
        request_id=spec.id,
        created=spec.created,
        status=status,
        model=spec.shown_model,
        seed=spec.seed,
        output=[
            item.shown(_item_status(item.is_complete or item is not output[-1], is_over, is_cut)) for item in output
        ],
        error=request.error if status == "failed" else None,
        usage=_usage(request) if is_over else None,
    )


def _status(request: RequestState, is_cut: bool) -> str:
    if request.outcome is Outcome.FAILED:
        return "failed"
    if request.outcome is Outcome.ABANDONED:
        return "cancelled"
    if all(sequence.is_over for sequence in request.sequences):
        return "incomplete" if is_cut else "completed"
    return "in_progress" if request.is_started else "queued"


def _item_status(is_complete: bool, is_over: bool, is_cut: bool) -> str:
    return "completed" if is_complete or (is_over and not is_cut) else "incomplete"


def _usage(request: RequestState) -> dict[str, Any]:
    given, made = request.prompt_tokens, request.completion_tokens
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": request.cached_tokens},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": request.reasoning_tokens},
        "total_tokens": given + made,
    }


def kept_record(request: RequestState) -> bytes:
    """Return what an orchestrator stores with the answer of a request; b"": nothing."""
    fields = request.spec.generation.response
    if not fields or not fields.is_kept_elsewhere or not (fields.is_stored or fields.conversation_id):
        return b""
    conversation = [*fields.conversation, answer_message(response_object(request)["output"])]
    inputs = inputs_json(fields, request.id)
    return encode_kept(KeptResponse(msgspec.msgpack.encode(conversation), inputs, request.spec.body_digest))


class ResponsesFormatter:
    """Formats the response of one request, which has one sequence."""

    opens_before_error = True  # OpenAI's client accepts no event before `response.created`

    def __init__(self, request: RequestState, vocabulary: TokenBytes) -> None:
        self._request = request
        self._parser = make_parser(request.spec.generation)
        self._is_parsed = False  # all of the text
        self._items = _Items(request)
        self._open: _OutputItem | None = None
        self._units = 0
        self._received = 0  # units that the client has: their events are not made
        self._first = CREATED  # sequence number of the first event that the client does not have
        self._events: list[BlockEvent] = []

    def opening_events(self) -> list[BlockEvent]:
        """Return the events before the first text; they are no units."""
        response = response_object(self._request, "in_progress")
        response["output"] = []  # as at the beginning, whenever the client comes
        response["usage"] = response["incomplete_details"] = response["error"] = None
        names = ((CREATED, "response.created"), (IN_PROGRESS, "response.in_progress"))
        return [
            BlockEvent(name.encode(), to_json({"type": name, "sequence_number": number, "response": response}), 0)
            for number, name in names
            if number >= self._first
        ]

    def text_events(self, sequence: SequenceState, new: str) -> list[BlockEvent]:
        """Return the events of new text. A sequence that `is_flushed` has its last text."""
        self._add(self._parse(new, is_last=sequence.is_flushed))
        return self._take()

    def end_events(self, sequence: SequenceState) -> list[BlockEvent]:
        """Return the events that end the last item."""
        self._add(self._parse("", is_last=True))
        if not self._items.all or (self._items.all[-1].kind == "reasoning" and sequence.finish_reason == "stop"):
            self._close("completed")
            self._begin(self._items.message())
        self._close("incomplete" if sequence.finish_reason == "length" else "completed")
        return self._take()

    def closing_events(self) -> list[BlockEvent]:
        """Return the event with the whole response."""
        response = response_object(self._request)
        self._event(f"response.{response['status']}", response=response)
        return self._take()

    def kept(self) -> bytes:
        """Return what an orchestrator stores with the answer; b"": nothing, or it is stored here."""
        return kept_record(self._request)

    def error_event(self, error: StarlingError) -> BlockEvent | None:
        """Return the event of an error, the last one; None: the client has it."""
        self._units += 1
        if self._units <= self._received:
            return None
        data = {
            "type": "response.failed",
            "sequence_number": self._units + IN_PROGRESS,
            "response": response_object(self._request, "failed"),
        }
        return BlockEvent(b"response.failed", to_json(data), self._units)

    def skip(self, text: str, *, is_whole: bool) -> None:
        """Count the events of `text`, from the beginning on, as sent. `is_whole`: it is all of the text."""
        self._add(self._parse(text, is_last=is_whole))
        self._take()

    def skip_units(self, units: int) -> None:
        """Make no events up to the unit `units`."""
        self._received = units

    def skip_numbers(self, number: int) -> None:
        """Make no events up to the one with this sequence number."""
        self._first = number + 1
        self._received = max(0, number - IN_PROGRESS)

    def whole_response(self) -> bytes:
        """Return the body of a response that is not streamed."""
        return to_json(response_object(self._request))

    # ----------------------------------------------------------------

    def _parse(self, new: str, *, is_last: bool) -> list[AnswerItem]:
        if self._parser is None:
            return [Text(new)] if new else []
        items = self._parser.feed(new) if not self._is_parsed else []
        if is_last and not self._is_parsed:
            self._is_parsed = True
            items += self._parser.finish()
        return items

    def _add(self, items: list[AnswerItem]) -> None:
        for item in items:
            if isinstance(item, Text):
                if self._open is None or self._open.kind != "message":
                    self._close("completed")
                    self._begin(self._items.message())
                self._delta("response.output_text.delta", item.text)
            elif isinstance(item, ReasoningText):
                if self._open is None:
                    self._begin(self._items.reasoning())
                self._delta("response.reasoning_text.delta", item.text)
            elif isinstance(item, CallBegin):
                self._close("completed")
                self._begin(self._items.call(item.name))
            elif isinstance(item, Arguments):
                self._delta("response.function_call_arguments.delta", item.text)
            elif isinstance(item, CallEnd) and item.is_complete:
                self._close("completed")

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": len(self._items.all) - 1}
        return place if self._open.kind == "function_call" else {**place, "content_index": 0}

    def _begin(self, item: _OutputItem) -> None:
        self._open = item
        shown = item.shown("in_progress", is_new=True)
        self._event("response.output_item.added", output_index=len(self._items.all) - 1, item=shown)
        if item.kind != "function_call":
            self._event("response.content_part.added", **self._place(), part=item.part(""))

    def _close(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        place, text = self._place(), item.text
        if item.kind == "message":
            self._event("response.output_text.done", **place, text=text, logprobs=[])
            self._event("response.content_part.done", **place, part=item.part(text))
        elif item.kind == "reasoning":
            self._event("response.reasoning_text.done", **place, text=text)
            self._event("response.content_part.done", **place, part=item.part(text))
        else:
            self._event("response.function_call_arguments.done", **place, name=item.name, arguments=text)
        index = len(self._items.all) - 1
        self._event("response.output_item.done", output_index=index, item=item.shown(status))
        self._open = None

    def _delta(self, name: str, text: str) -> None:
        assert self._open is not None
        self._open.parts.append(text)
        begin = self._units
        self._units += len(text)
        text = text[max(0, self._received - begin) :]
        if text:
            more: dict[str, Any] = {"logprobs": []} if self._open.kind == "message" else {}
            self._append(name, **self._place(), delta=text, **more)

    def _event(self, name: str, /, **fields: Any) -> None:
        self._units += 1
        if self._units > self._received:
            self._append(name, **fields)

    def _append(self, name: str, /, **fields: Any) -> None:
        data = {"type": name, "sequence_number": self._units + IN_PROGRESS, **fields}
        self._events.append(BlockEvent(name.encode(), to_json(data), self._units))

    def _take(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events
