"""How a server names its output tokens to what forwards its answers, and goes on from those of another server.

    X-Starling-Relay: 1; tenant=NAME; priority=N
                            the sender forwards the answer to a client: a stream has a comment for the tokens of each
                            step, `: tokens CHOICE FIRST CACHED ID,ID,...`, and a lost connection does not cancel the
                            request; FIRST: index of the first one, CACHED: tokens of the prompt from the KV cache.
                            The request counts as the tenant's, with that priority, if they are given
    X-Starling-Output: N    the last N bytes of the body are an `Output`: the answer goes on from these tokens

Both need an administrator's key where the server has keys.  Text and events follow from the tokens, so that the stream
of the second server begins with the same bytes, without computing a token again.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from pipeline.errors import InvalidRequest
from shm.decoding import DECODE_ERRORS

RELAY = "X-Starling-Relay"
OUTPUT = "X-Starling-Output"
MAX_OUTPUT_BYTES = 8 << 20  # of an `Output`: two million tokens
COMMENT = b": tokens "
MAX_PRIORITY = 1000
_RELAY = re.compile(r"1(?:; *tenant=([A-Za-z0-9._@-]{1,64})(?:; *priority=(-?[0-9]{1,4}))?)?")
_COMMENT = re.compile(rb": tokens ([0-9]{1,4}) ([0-9]{1,9}) ([0-9]{1,9}) ([0-9]{1,10}(?:,[0-9]{1,10})*)")
_ROWS = re.compile(rb"(?:: tokens [0-9]{1,4} [0-9]{1,9} [0-9]{1,9} [0-9]{1,10}(?:,[0-9]{1,10})*\n\n)+")


class Relayed(NamedTuple):
    """For whom the sender forwards the answer."""

    tenant: str = ""  # "": that of the API key
    priority: int = 0


class NamedTokens(NamedTuple):
    """What a comment says."""

    choice: int
    first: int  # index of the first token
    cached: int  # tokens of the prompt that came from the KV cache, as usage shows them
    tokens: list[int]


class Output(msgspec.Struct, array_like=True, frozen=True):
    """The output of a request so far."""

    version: str  # as `version_name` returns it; an answer goes on only on the same one
    tokens: list[bytes]  # of each sequence from the first on, i32 little-endian; missing ones have none
    cached: list[int] = []  # of each of them: tokens of the prompt that came from the KV cache


_decode = msgspec.msgpack.Decoder(Output).decode
_decode_rows = msgspec.json.Decoder(list[list[int]]).decode


def version_name(digest: str, kv_type: str, numerics: int) -> str:
    """The name of what determines the bytes of answers.

    digest: SHA-256 of the GGUF file.  kv_type: followed by `Index.revision`.
    """
    return f"{digest}-{kv_type}-{numerics}"


def relay_header(tenant: str, priority: int) -> str:
    """The value of `X-Starling-Relay`."""
    return f"1; tenant={tenant}; priority={priority}" if tenant else "1"


def read_relay(given: str) -> Relayed:
    """Read the header. Raises `InvalidRequest`."""
    match = _RELAY.fullmatch(given)
    if match is None:
        raise InvalidRequest(
            f"{RELAY} is {given[:120]!r}; expected 1, then at most ; tenant=NAME; priority=N with a name of 1 to 64 "
            f"letters, digits and ._@- and a number up to {MAX_PRIORITY}",
            RELAY,
        )
    return Relayed(match[1] or "", max(-MAX_PRIORITY, min(int(match[2] or 0), MAX_PRIORITY)))


def comment(choice: int, first: int, cached: int, tokens: Sequence[int]) -> bytes:
    """The comment of a stream for the output tokens of a choice from the index `first` on."""
    return b": tokens %d %d %d %b\n\n" % (choice, first, cached, ",".join(map(str, tokens)).encode())


def read_comment(block: bytes) -> NamedTokens | None:
    """What a comment, without its end, says; None if it is another one."""
    match = _COMMENT.fullmatch(block)
    if match is None:
        return None
    return NamedTokens(int(match[1]), int(match[2]), int(match[3]), [int(one) for one in match[4].split(b",")])


def read_comments(blocks: bytes) -> list[NamedTokens]:
    """What comments, with their ends, say. Other blocks are left out."""
    if _ROWS.fullmatch(blocks):
        # Decoding them as JSON takes a third of the time of `read_comment`.
        rows = blocks[:-2].replace(b": tokens ", b"[").replace(b" ", b",").replace(b"\n\n", b"],")
        with suppress(msgspec.DecodeError):  # a number that begins with 0
            return [NamedTokens(row[0], row[1], row[2], row[3:]) for row in _decode_rows(b"[%b]]" % rows)]
    return [found for block in blocks.split(b"\n\n") if (found := read_comment(block)) is not None]


def encode_output(version: str, tokens: Sequence[array[int]], cached: Sequence[int] = ()) -> bytes:
    """The end of a body with `X-Starling-Output`."""
    return msgspec.msgpack.encode(Output(version, [one.tobytes() for one in tokens], list(cached)))


def output_length(given: str | None) -> int:
    """Read the header; 0 without one. Raises `InvalidRequest`."""
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) <= 8 and 0 < int(given) <= MAX_OUTPUT_BYTES):
        raise InvalidRequest(
            f"{OUTPUT} is {given[:40]!r}; it must be the number of bytes of the output at the end of the body, from 1 "
            f"to {MAX_OUTPUT_BYTES}",
            OUTPUT,
        )
    return int(given)


def decode_output(data: bytes) -> Output:
    """Read the end of a body. Raises `InvalidRequest`."""
    try:
        output = _decode(data)
    except DECODE_ERRORS as error:
        raise InvalidRequest(f"the output at the end of the body cannot be read: {error}", OUTPUT) from None
    if any(len(one) % 4 for one in output.tokens):
        raise InvalidRequest("the output at the end of the body has a part of a token", OUTPUT)
    return output
