"""From the bytes of a body to a valid request: one reader for each kind of endpoint.

A reader's result is bounded: whatever a body holds, what remains are a few thousand objects, texts, and token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline.api.content_coding import decompress
from pipeline.api.json_body import parse_object
from stages.gateway.endpoints import chat, completions, conversations, embeddings, generate, messages, rerank, responses
from stages.gateway.endpoints.session_close import read_close
from stages.gateway.endpoints.tokenize import read_detokenize, read_tokenize

BODY_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "generate": generate.read,
    "chat": chat.read,
    "completions": completions.read,
    "messages": messages.read,
    "responses": responses.read,
    "conversation": conversations.read_create,
    "conversation_update": conversations.read_update,
    "conversation_items": conversations.read_items,
    "count_tokens": messages.read_count,
    "embeddings": embeddings.read,
    "rerank": rerank.read_rerank,
    "score": rerank.read_score,
    "session_close": read_close,
    "tokenize": read_tokenize,
    "detokenize": read_detokenize,
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
