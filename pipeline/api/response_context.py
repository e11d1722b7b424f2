"""How an orchestrator gives an engine the conversation before a request for /v1/responses, and gets the answer's.

    X-Starling-Conversation: N
                            the last N bytes of the body, before those of `X-Starling-Output`, are MessagePack: the
                            messages before the input, as `previous_response_id` or `conversation` names them, maybe
                            none.  The sender keeps conversations and answers: the engine stores nothing

    X-Starling-Kept: N      of an answer to such a request: the last N bytes of the body are a `KeptResponse`, which
                            the sender stores with it.  A stream has it as a comment before its last
                            event, `: kept BASE64`

It needs an administrator's key where the server has keys.  A stream that fails has a comment before its last event,
`: failed CODE`, because the codes of the API do not say whether another engine may go on.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.errors import InternalError, InvalidRequest
from shm.decoding import DECODE_ERRORS

HEADER = "X-Starling-Conversation"
KEPT_HEADER = "X-Starling-Kept"
MAX_BYTES = 4 << 20  # of a conversation with its input: a million tokens
MAX_KEPT_BYTES = 11 << 20  # of a `KeptResponse`, which has the input twice: as a comment it fits into an event
KEPT = b": kept "
FAILED = b": failed "
_FAILED = re.compile(rb": failed ([A-Z_]{1,64})")


class KeptResponse(msgspec.Struct, array_like=True, frozen=True):
    """What is stored with a response."""

    conversation: bytes  # MessagePack, messages of the chat template without instructions, with the answer's
    inputs: bytes  # JSON, the items of the input
    digest: bytes = b""  # of the body of a request with an Idempotency-Key; b"" also from older releases


def encode_kept(kept: KeptResponse) -> bytes:
    """Return the end of a body with `X-Starling-Kept`."""
    return msgspec.msgpack.encode(kept)


def decode_kept(data: bytes) -> KeptResponse | None:
    """Read the end of a body; None for something else."""
    try:
        return msgspec.msgpack.decode(data, type=KeptResponse)
    except DECODE_ERRORS:
        return None


def split_kept(body: bytes, given: str | None) -> tuple[bytes, KeptResponse | None]:
    """Return the body without its end, and what that says. `given`: `KEPT_HEADER`. Raises `InternalError`."""
    if given is None:
        return body, None
    is_length = given.isascii() and given.isdigit() and len(given) <= 8 and 0 < int(given) <= MAX_KEPT_BYTES
    kept = decode_kept(body[-int(given) :]) if is_length else None
    if kept is None:
        raise InternalError("the engine's answer has no readable record to be stored: run the same release everywhere")
    return body[: -int(given)], kept


def kept_comment(data: bytes) -> bytes:
    """Return the comment for an encoded `KeptResponse`."""
    return KEPT + binascii.b2a_base64(data, newline=False) + b"\n\n"


def read_kept(block: bytes) -> KeptResponse | None:
    """Read such a comment, without its end; None for another block."""
    if not block.startswith(KEPT):
        return None
    try:
        return decode_kept(binascii.a2b_base64(block[len(KEPT) :], strict_mode=True))
    except binascii.Error:
        return None


def encode(messages: Sequence[dict[str, Any]]) -> bytes:
    """Return the end of a body with the header."""
    return msgspec.msgpack.encode(messages)


def length(given: str | None) -> int:
    """Read `HEADER`; 0 without one. Raises `InvalidRequest`."""
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) <= 8 and 0 < int(given) <= MAX_BYTES):
        raise InvalidRequest(
            f"{HEADER} is {given[:40]!r}; it must be the number of bytes of the conversation at the end of the body, "
            f"from 1 to {MAX_BYTES}",
            HEADER,
        )
    return int(given)


def decode(data: bytes) -> list[dict[str, Any]]:
    """Read the end of a body. Raises `InvalidRequest`."""
    try:
        return msgspec.msgpack.decode(data, type=list[dict[str, Any]])
    except DECODE_ERRORS as error:
        raise InvalidRequest(f"the conversation at the end of the body cannot be read: {error}", HEADER) from None


def failed_comment(code: str) -> bytes:
    """Return the comment before the last event of a stream that fails."""
    return FAILED + code.encode() + b"\n\n"


def read_failed(block: bytes) -> str:
    """Return the code of such a comment, without its end; "" if it is another one."""
    match = _FAILED.fullmatch(block)
    return match[1].decode() if match is not None else ""
