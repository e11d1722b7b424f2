"""The header `Idempotency-Key`: which keys are valid, and the digest by which a repetition is known as one. Pure."""

from __future__ import annotations

import hashlib
import re

from pipeline.errors import Conflict, InvalidRequest

HEADER = "Idempotency-Key"
_KEY = re.compile(r"[!-~]{1,128}")


def read_key(given: str | None) -> str:
    """Return the value of the header; "" without one. Raises `InvalidRequest`."""
    if given is None:
        return ""
    if not _KEY.fullmatch(given):
        raise InvalidRequest(
            f"{HEADER} is {given[:80]!r}; it must have 1 to 128 printable ASCII characters and no space", HEADER
        )
    return given


def digest_head(endpoint: str, coding: str) -> bytes:
    """Return what is hashed before a body. endpoint: the name of the body's reader; coding: `Content-Encoding`."""
    return f"{endpoint}\n{coding}\n".encode()


def body_digest(endpoint: str, coding: str, body: bytes) -> bytes:
    """Return the SHA-256 of a body as it was sent, which repetitions of a request have in common."""
    return hashlib.sha256(digest_head(endpoint, coding) + body).digest()


def other_body(key: str = "") -> Conflict:
    """Return the error for a key that an earlier request had."""
    named = f"{HEADER} {key!r}" if key else HEADER
    return Conflict(
        f"{named} was sent with another body or to another endpoint before; send the same bytes again, or use a new "
        "key",
        HEADER,
    )
