"""What goes from engine to engine when a session moves, and the states that a move leaves in a session's file. Pure.

    HELD     here, and nowhere else: turns begin
    ARRIVED  a copy from another agent, which still has the session: no turn begins
    MOVED    gone to another agent, whose copy may still be ARRIVED: only a tombstone without tokens is left
    SETTLED  the same, and the other copy is HELD: the tombstone only says where, for `TOMBSTONE_S`

A move is named by a hash of everything that is sent and of its two agents.  The source compares the name with that of
its session as it is when it gives the session up: what was changed meanwhile does not move.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Literal

import msgspec
import xxhash

from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import MAX_SESSION_ID
from shm.decoding import DECODE_ERRORS

State = Literal["held", "arrived", "moved", "settled"]
HELD: State = "held"
ARRIVED: State = "arrived"
MOVED: State = "moved"
SETTLED: State = "settled"

TOMBSTONE_S = 3600.0  # for which an engine says where a session went: orchestrators learn it with their next turn
FORMAT = 1
_CHECKSUM_BYTES = 8


class Mark(msgspec.Struct, array_like=True):
    """A record of a session's file: the session's state from here on."""

    state: State
    agent: str  # the other one: the source if ARRIVED, the target if MOVED or SETTLED; "": it did not move
    move: str
    turns: int  # committed
    changes: int  # of the state, over all agents
    at: float  # s since 1970


class SentSession(msgspec.Struct, array_like=True, kw_only=True):
    """A session on its way to another engine."""

    format: int = FORMAT
    digest: str  # of the model file, hex
    tokenizer: str  # digest, hex
    source: str  # agents
    target: str
    id: str
    tenant: str
    salt: str
    ttl_s: int
    created: float  # s since 1970
    last_use: float  # likewise
    turns: int
    changes: int
    tokens: bytes  # int32 little-endian

    @property
    def move(self) -> str:
        """The name of this move."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:40]

    @property
    def version(self) -> tuple[float, int, int]:
        """Grows with each turn and each move of a session."""
        return self.created, self.changes, self.turns

    @property
    def token_ids(self) -> array[int]:
        """The tokens."""
        found = array("i")
        found.frombytes(self.tokens)
        return found

    def encode(self) -> bytes:
        """The bytes that are sent, with a checksum, which finds accidents."""
        raw = msgspec.msgpack.encode(self)
        return xxhash.xxh3_64_digest(raw) + raw


def decode_sent(raw: bytes) -> SentSession:
    """Raises `InvalidRequest`."""
    if xxhash.xxh3_64_digest(raw[_CHECKSUM_BYTES:]) != raw[:_CHECKSUM_BYTES]:
        raise InvalidRequest("the sent session is damaged: its checksum differs", "record")
    try:
        sent = msgspec.msgpack.decode(raw[_CHECKSUM_BYTES:], type=SentSession)
    except DECODE_ERRORS as error:
        raise InvalidRequest(f"the sent session cannot be read: {error}; run the same release", "record") from None
    if sent.format != FORMAT:
        raise InvalidRequest(
            f"the sent session has format {sent.format}, expected {FORMAT}: update the agent", "record"
        )
    if len(sent.tokens) % 4 or not 0 < len(sent.id) <= MAX_SESSION_ID:
        raise InvalidRequest(
            f"the sent session has {len(sent.tokens)} bytes of tokens, of 4 each, and an id of {len(sent.id)} "
            f"characters, of at most {MAX_SESSION_ID}",
            "record",
        )
    if min(sent.turns, sent.changes, sent.ttl_s) < 0:
        raise InvalidRequest("the sent session has negative counts", "record")
    return sent
