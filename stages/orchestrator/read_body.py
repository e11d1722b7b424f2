"""What the orchestrator reads of a client's body, once, before the body is sent anywhere.

The body is strict JSON, as the engines read it, and is forwarded as it was sent.  Read are the model, whether the
answer is streamed, the session, and the prompt's bytes for routing.  Other fields are the engine's: it refuses what is
wrong, and its answer is passed on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeline.api.content_coding import decompress
from pipeline.api.fields import flag, text
from pipeline.api.generation_fields import MAX_MODEL_CHARACTERS, MAX_SALT_CHARACTERS
from pipeline.api.json_body import parse_object
from pipeline.errors import InvalidRequest
from stages.orchestrator.prefixes import block_hashes, prompt_text

MAX_SESSION_CHARACTERS = 256
_READ_MODEL = text(MAX_MODEL_CHARACTERS, empty=False)
_READ_SALT = text(MAX_SALT_CHARACTERS, empty=False)
_READ_SESSION = text(MAX_SESSION_CHARACTERS)


class ReadBody(NamedTuple):
    """What the orchestrator reads of a body."""

    model: str
    is_stream: bool
    session: str | None  # None: none; "": a new one
    blocks: tuple[int, ...]
    prompt_bytes: int


def read_body(body: bytes, content_type: str, coding: str, max_bytes: int, tenant_salt: str = "") -> ReadBody:
    """Read a body. Raises `InvalidRequest`, `TooLarge`."""
    plain = decompress(body, coding, max_bytes)
    fields: dict[str, Any] = parse_object(plain, content_type)
    if fields.get("model") is None:
        raise InvalidRequest("model is missing; it is required: GET /v1/models lists the models of the fleet", "model")
    model = _READ_MODEL(fields["model"], "model")
    is_stream = flag(fields["stream"], "stream") if fields.get("stream") is not None else False
    salt = _READ_SALT(fields["cache_salt"], "cache_salt") if fields.get("cache_salt") is not None else ""
    session = _READ_SESSION(fields["session_id"], "session_id") if fields.get("session_id") is not None else None
    prompt = prompt_text(fields)
    blocks = block_hashes(prompt, f"{model}\0{tenant_salt}\0{salt}")
    return ReadBody(model, is_stream, session, blocks, len(prompt))
