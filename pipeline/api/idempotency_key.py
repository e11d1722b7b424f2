"""The header `Idempotency-Key`: which keys are valid, and what a repetition is known by. Pure."""

from __future__ import annotations

import re

from pipeline.errors import Conflict, InvalidRequest

HEADER = "Idempotency-Key"
_KEY = re.compile(r"[!-~]{1,128}")
_SENT_BEFORE = "was sent with another body or to another endpoint before"


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
    """Return what is hashed before a body as it was sent: repetitions of a request have the SHA-256 in common.

    endpoint: the name of the body's reader; coding: `Content-Encoding`.
    """
    return f"{endpoint}\n{coding}\n".encode("utf-8", "surrogateescape")


def other_body(key: str = "") -> Conflict:
    """Return the error for a key that an earlier request had."""
    named = f"{HEADER} {key!r}" if key else HEADER
    error = Conflict(f"{named} {_SENT_BEFORE}; send the same bytes again, or use a new key", HEADER)
    error.is_final = True
    return error


def is_other_body(message: str) -> bool:
    """Return whether an error is that of `other_body`, by its message: Anthropic's form of errors names no field."""
    return message.startswith(HEADER) and _SENT_BEFORE in message
