"""Responses of OpenAI's Responses API as objects, and the messages that they become in the next request.

Gateway and orchestrator share this: the gateway makes an answer, and both continue the conversations that they store.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pipeline.api import sse
from pipeline.api.json_body import to_json
from pipeline.api.json_prefix import JsonValue
from pipeline.api.requests.conversations import ConversationItem, conversation_item
from pipeline.api.requests.generation_request import GenerationRequest, ResponseFields
from pipeline.api.requests.response_items import encoded_item, joined_item, read_item
from pipeline.api.requests.tool_history import check_results, template_call
from pipeline.errors import StarlingError

ID_PREFIX = "resp_"


def response_id_of(request_id: str) -> str:
    """The id of the response that a request makes."""
    return ID_PREFIX + request_id.removeprefix("req-")


def request_id_of(response_id: str) -> str:
    """The id of the request that made a response."""
    return "req-" + response_id.removeprefix(ID_PREFIX)


def make_response(
    fields: ResponseFields,
    *,
    request_id: str,
    created: int,
    status: str,
    model: str,
    seed: int,
    output: Sequence[dict[str, Any]] = (),
    error: StarlingError | None = None,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a response. `created`: s since 1970; `output`: items as clients see them."""
    return {
        "id": response_id_of(request_id),
        "object": "response",
        "created_at": created,
        "status": status,
        "background": fields.in_background,
        "conversation": {"id": fields.conversation_id} if fields.conversation_id else None,
        "error": _error_object(error) if error is not None else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": list(output),
        "reasoning": {"effort": fields.effort or None, "summary": None},
        "seed": seed,
        "service_tier": "default",
        "store": fields.is_stored,
        "truncation": "disabled",
        "usage": usage,
        **msgspec.json.decode(fields.repeated),
    }


def failed_response(response: dict[str, Any], error: StarlingError) -> dict[str, Any]:
    """Return the response as one that has failed."""
    shown = {"status": "failed", "error": _error_object(error), "incomplete_details": None, "usage": None}
    return {**response, **shown}


def refused_events(response: dict[str, Any], error: StarlingError) -> list[bytes]:
    """Return all events of a request that fails before its answer begins: its response before and after that.

    OpenAI's client accepts no other event before `response.created`.  They are no units of the answer.
    """
    begun = {**response, "status": "in_progress"}
    responses = {"created": begun, "in_progress": begun, "failed": failed_response(response, error)}
    return [
        sse.event(to_json({"type": name, "sequence_number": number, "response": one}), name=name.encode())
        for number, (name, one) in enumerate((f"response.{key}", one) for key, one in responses.items())
    ]


def _error_object(error: StarlingError) -> dict[str, str]:
    """The error of a response. The codes of the API are few."""
    server = "server_error" if error.status >= 500 else "invalid_prompt"
    return {"code": "rate_limit_exceeded" if error.status == 429 else server, "message": error.message}


# ---------------------------------------------------------------- the next request


def with_conversation(
    generation: GenerationRequest, previous: Sequence[dict[str, Any]], field: str = "previous_response_id"
) -> GenerationRequest:
    """Return a request for a response that continues `previous`, messages without instructions.

    field: of the request, which names them in errors.  Raises `InvalidRequest` for results without calls.
    """
    fields = generation.response or ResponseFields()
    given = fields.conversation
    conversation = [*previous, *given]
    places = [field] * len(previous) + _places(given)
    check_results(conversation, places, "call_id")
    instructions = (generation.messages or [])[: fields.n_instructions]
    return msgspec.structs.replace(
        generation,
        messages=[*instructions, *conversation],
        response=msgspec.structs.replace(fields, conversation=conversation),
    )


def _places(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Of each message of an input, the last item that it was made of: reasoning, text and calls are one message."""
    places, count = [], 0
    for message in messages:
        parts = len(message.get("tool_calls", ())) + bool(message.get("reasoning_content"))
        count += parts + bool(message["content"] or not parts)
        places.append(f"input[{count - 1}]")
    return places


def answer_message(output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the output of a response as a message of the chat template, for the next request of the conversation."""
    text = "".join(_text(item) for item in output if item["type"] == "message")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning := "".join(_text(item) for item in output if item["type"] == "reasoning"):
        message["reasoning_content"] = reasoning
    calls = [_call(item) for item in output if item["type"] == "function_call"]
    return {**message, "tool_calls": calls} if calls else message


def answer_items(output: Sequence[dict[str, Any]]) -> list[ConversationItem]:
    """Return the output of a response as items of a conversation."""
    made = []
    for item in output:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if item["type"] == "function_call":
            message["tool_calls"] = [_call(item)]
        elif item["type"] == "reasoning":
            message["reasoning_content"] = _text(item)
        else:
            message["content"] = _text(item)
        made.append(ConversationItem(item["id"], to_json(item), message))
    return made


def input_items(fields: ResponseFields, request_id: str) -> list[ConversationItem]:
    """Return the items of a request's input, as a conversation has them."""
    return [
        conversation_item(item, read_item(joined_item(item), "input"), name)
        for name, item in _given(fields, request_id)
    ]


def shown_inputs(fields: ResponseFields, request_id: str) -> list[tuple[str, bytes]]:
    """Return the items of a request's input as clients see them: ids and JSON."""
    items = (conversation_item(item, {}, name) for name, item in _given(fields, request_id))
    return [(item.id, item.item) for item in items]


def inputs_json(fields: ResponseFields, request_id: str) -> bytes:
    """Return the same as JSON, an array."""
    return to_json([msgspec.Raw(item) for _, item in shown_inputs(fields, request_id)])


def _given(fields: ResponseFields, request_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each item of the input, and the item."""
    name = request_id.removeprefix("req-")
    for index, item in enumerate(msgspec.json.decode(fields.inputs, type=list[msgspec.Raw])):
        yield f"{name}i{index:03d}", encoded_item(item)


def _text(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])


def _call(item: dict[str, Any]) -> dict[str, Any]:
    return template_call(item["call_id"], item["name"], _arguments(item["arguments"]))


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call, as a whole object if they were cut off. Whole numbers have at most 64 bits."""
    value = JsonValue()
    value.feed(text, 0, len(text))
    try:
        arguments = msgspec.json.decode(value.closed(text) or "{}")
        msgspec.msgpack.encode(arguments)
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError):
        return {}
    return arguments if isinstance(arguments, dict) else {}
