"""How an agent's door names the text of another engine's answer, and goes on from that of another one.

    : text TOKENS           a comment before an event of a stream that is forwarded (`X-Starling-Relay`): the output
                            tokens so far, as the engine counts them
    X-Starling-Text: N      the last N bytes of the body are a `TextSoFar`: the answer goes on after it
    X-Starling-Text: fixed  of a response: no other engine can go on with the stream, whose text is not all of it

Another engine samples the rest anew: the text that a client gets is one text, but not the one that the first engine
would have finished.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.errors import InvalidRequest
from shm.decoding import DECODE_ERRORS

TEXT = "X-Starling-Text"
FIXED = "fixed"
REPLAYED = "starling_replayed"  # field of the last events of a stream, and a comment: how often it was replayed
COMMENT = b": text "
MAX_TEXT_BYTES = 1 << 20  # of a text that another engine goes on from
_COMMENT = re.compile(rb": text ([0-9]{1,9})")


class TextSoFar(msgspec.Struct, frozen=True, kw_only=True):
    """What the client has."""

    text: str
    tokens: Annotated[int, Meta(ge=0, le=1 << 30)]  # of the output, as the engine before has counted them


def comment(tokens: int) -> bytes:
    """The comment of a stream."""
    return b": text %d\n\n" % tokens


def read_comment(block: bytes) -> int | None:
    """The tokens that a comment, without its end, names; None if it is another one."""
    match = _COMMENT.fullmatch(block)
    return int(match[1]) if match is not None else None


def encode(so_far: TextSoFar) -> bytes:
    """The end of a body with `X-Starling-Text`."""
    return msgspec.json.encode(so_far)


def split_body(given: str | None, body: bytes) -> tuple[bytes, TextSoFar | None]:
    """The body, and what the header says that follows it. Raises `InvalidRequest`."""
    if given is None:
        return body, None
    size = int(given) if given.isascii() and given.isdigit() and len(given) <= 8 else 0
    if not 0 < size <= min(6 * MAX_TEXT_BYTES, len(body)):
        raise InvalidRequest(
            f"{TEXT} is {given[:40]!r}; it must be the number of bytes of the text at the end of the body", TEXT
        )
    try:
        return body[:-size], msgspec.json.decode(body[-size:], type=TextSoFar)
    except DECODE_ERRORS as error:
        raise InvalidRequest(f"the text at the end of the body cannot be read: {error}", TEXT) from None
