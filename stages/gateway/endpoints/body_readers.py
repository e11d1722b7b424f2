"""From the bytes of a body to a valid request: one reader for each kind of endpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeline.api.content_coding import decompress
from pipeline.api.json_body import parse_object
from pipeline.api.requests.readers import READERS, BodyReader
from stages.gateway.endpoints import conversations, responses

BODY_READERS: dict[str, BodyReader] = {
    **READERS,
    "responses": responses.read,
    "conversation": conversations.read_create,
    "conversation_update": conversations.read_update,
    "conversation_items": conversations.read_items,
    "object": lambda body: body,
}


class Body(NamedTuple):
    """A request's body as it was received."""

    data: bytes | bytearray
    reader: str  # a key of BODY_READERS
    content_type: str
    coding: str  # Content-Encoding
    max_bytes: int  # without its coding


def read_request_body(body: Body) -> Any:
    """Return the result of the body's reader. Raises `StarlingError`."""
    plain = decompress(bytes(body.data), body.coding, body.max_bytes)
    return BODY_READERS[body.reader](parse_object(plain, body.content_type))
