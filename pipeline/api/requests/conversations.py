"""/v1/conversations: the fields of its bodies, and items as clients see them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from pipeline.api.fields import FieldTable, Reader, invalid_value, object_schema, read_fields, text
from pipeline.api.generation_fields import read_metadata
from pipeline.api.json_body import to_json
from pipeline.api.json_schema import any_of, array_of, described, schema_of
from pipeline.api.requests.response_items import ITEM_SCHEMA, read_item
from pipeline.errors import InvalidRequest

MAX_NEW_ITEMS = 20  # of one request; as in OpenAI's API
MAX_ID = 256
ENTRY_BYTES = 256  # of an item beside its texts
ID_PREFIX = "conv_"
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


class ConversationItem(msgspec.Struct, array_like=True, frozen=True):
    """An item, and the message or part of one that it becomes."""

    id: str
    item: bytes  # JSON, as clients see it
    message: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.item) + len(msgspec.msgpack.encode(self.message)) + ENTRY_BYTES


class NewItem(NamedTuple):
    """A valid item of a body. `message`: what it becomes."""

    item: dict[str, Any]  # as the client sent it
    message: dict[str, Any]

    def named(self, name: str) -> ConversationItem:
        """The item with an id that has `name`."""
        return conversation_item(self.item, self.message, name)


@described(array_of(ITEM_SCHEMA, most=MAX_NEW_ITEMS))
def read_new_items(value: Any, name: str) -> list[NewItem]:
    """Read items to be added."""
    if not isinstance(value, list):
        raise invalid_value(name, value, "an array of items")
    if len(value) > MAX_NEW_ITEMS:
        raise InvalidRequest(f"{name} has {len(value)} items; at most {MAX_NEW_ITEMS} are allowed at once", name)
    return [NewItem(item, read_item(item, f"{name}[{index}]")) for index, item in enumerate(value)]


def conversation_item(item: dict[str, Any], message: dict[str, Any], name: str) -> ConversationItem:
    """The item of a conversation, in the form of the API. `item`: as a client sent it, with a type or a role."""
    kind = item.get("type") or "message"
    shown = {**item, "type": kind, "id": f"{_PREFIXES[kind]}{name}", "status": "completed"}
    if kind == "message" and isinstance(item["content"], str):
        part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
        if item["role"] == "assistant":
            part = {"type": "output_text", "text": item["content"], "annotations": [], "logprobs": []}
        shown["content"] = [part]
    return ConversationItem(shown["id"], to_json(shown), message)


def text_item(content: str) -> dict[str, Any]:
    """The item of an input that is a text."""
    return {"role": "user", "content": content}


_CREATE: dict[str, Reader] = {"items": read_new_items, "metadata": read_metadata}
CREATE_BODY = FieldTable(_CREATE)
UPDATE_BODY = FieldTable({"metadata": read_metadata}, ("metadata",))
ITEMS_BODY = FieldTable({"items": read_new_items}, ("items",))


class NewConversation(NamedTuple):
    """A body of POST /v1/conversations or of an update."""

    items: list[NewItem]
    metadata: bytes  # JSON


def read_create(body: dict[str, Any]) -> NewConversation:
    """Read the body of a new conversation. Raises `InvalidRequest`."""
    values = CREATE_BODY.read(body)
    return NewConversation(values.get("items", []), to_json(body.get("metadata") or {}))


def read_update(body: dict[str, Any]) -> NewConversation:
    """Read the body that replaces the metadata. Raises `InvalidRequest`."""
    UPDATE_BODY.read(body)
    return NewConversation([], to_json(body["metadata"]))


def read_items(body: dict[str, Any]) -> NewConversation:
    """Read the body with items to be added. Raises `InvalidRequest`."""
    items = ITEMS_BODY.read(body)["items"]
    if not items:
        raise InvalidRequest("items is empty; send at least one item", "items")
    return NewConversation(items, b"{}")


_ID = text(MAX_ID, empty=False)
_REFERENCE: dict[str, Reader] = {"id": _ID}


@described(any_of(schema_of(_ID), object_schema(_REFERENCE, required=("id",))))
def read_conversation(value: Any, name: str) -> str:
    """Read the `conversation` of a request for a response: an id, or an object with one."""
    if isinstance(value, dict):
        return str(read_fields(value, _REFERENCE, required=("id",), within=name)["id"])
    return str(_ID(value, name))
