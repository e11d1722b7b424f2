"""Conversations of OpenAI's API as objects: what clients see of one, its bounds, and the messages of its items.

Gateway and orchestrator share this; each stores them in its own way.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from pipeline.api.json_body import to_json
from pipeline.api.requests.conversations import ConversationItem
from pipeline.api.requests.response_items import add_message, encoded_item, joined_item, read_item
from pipeline.errors import InvalidRequest, NotFound, StarlingError

MAX_ITEMS = 4096  # of a conversation
CONVERSATION_BYTES = 4096  # of a conversation without items: bounds how many a tenant has


class Conversation(NamedTuple):
    """A conversation without its items."""

    id: str
    created: int  # s since 1970
    metadata: bytes  # JSON

    @property
    def shown(self) -> dict[str, Any]:
        """As clients see it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created,
            "metadata": msgspec.Raw(self.metadata),
        }


class TooLargeError(Exception):
    """A conversation cannot have so many items, or so many bytes."""

    def of_items(self) -> StarlingError:
        """The error for a client that adds items."""
        return InvalidRequest(f"the items do not fit into the conversation: {self}", "items")

    def of_response(self) -> StarlingError:
        """The error for a client whose response continues the conversation."""
        message = f"the response does not fit into its conversation: {self}; begin another one"
        return StarlingError("INSUFFICIENT_RESOURCES", message, "conversation")


def check_bounds(n_items: int, nbytes: int, max_bytes: int) -> None:
    """Raises `TooLargeError` for a conversation that would be larger than allowed."""
    if n_items > MAX_ITEMS:
        raise TooLargeError(f"it would have {n_items} items; at most {MAX_ITEMS} are allowed")
    if nbytes > max_bytes:
        raise TooLargeError(f"it would have {nbytes} bytes; stored_responses.tenant_mb allows {max_bytes}")


def joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for the chat template. Items of one answer become one message."""
    made: list[dict[str, Any]] = []
    for message in messages:
        add_message(made, message)
    return made


def stored_items(inputs: bytes) -> list[ConversationItem]:
    """Return the items of a stored response's input, which is JSON with their ids."""
    items = []
    for raw in msgspec.json.decode(inputs, type=list[msgspec.Raw]):
        item = encoded_item(raw)
        items.append(ConversationItem(item["id"], bytes(raw), read_item(joined_item(item), "input")))
    return items


def deleted_body(name: str) -> bytes:
    """Return the body of the answer when a conversation was deleted."""
    return to_json({"id": name, "object": "conversation.deleted", "deleted": True})


def missing(name: str, field: str = "") -> NotFound:
    """Return the error for a conversation that is not there. `field`: of the request that names it."""
    return NotFound(f"there is no conversation {name[:80]!r}; it was deleted, or has expired", field)


def missing_item(name: str, item_id: str) -> NotFound:
    """Return the error for an item that a conversation does not have."""
    return NotFound(f"conversation {name[:80]!r} has no item {item_id[:80]!r}")
