"""A session, and the sessions of one model on disk: one file for each, appended to and never rewritten.

    record   as in pipeline/record_file.py; the checksum covers the payload
    kind 1   msgpack of `Opened`: the first record
    kind 2   a turn: time (f64, s since 1970), base (u32), tokens (int32 each), little-endian

A record is durable (`fdatasync`) before the turn is acknowledged.  A partial record that a crash leaves at the end of a
file is recognised and cut off; a file without an intact first record is removed.  On a full disk the turn is refused
and the session stays as it was.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pipeline.faults import points
from pipeline.record_file import PAYLOAD_CHECKED
from stages.kv.pool.prefix_hash import PageHash

log = logging.getLogger("starling.kv")

SUFFIX = ".session"
_TURN = struct.Struct("<dI")
assert _TURN.size == 12
_OPENED, _COMMITTED = 1, 2


@dataclass
class Session:
    """The tokens of a conversation, in the order of its turns."""

    id: str
    tenant: str
    salt: str
    ttl_s: int  # removed when unused for this time; 0: never
    created: float  # s since 1970
    last_use: float  # s since 1970
    tokens: array[int] = field(default_factory=lambda: array("i"))
    turns: int = 0  # committed
    last_base: int = 0  # number of older tokens that the last turn kept
    holder: bytes = b""  # peer of the turn in progress; b"": no turn is in progress
    page_hashes: list[PageHash] = field(default_factory=list)  # of its full pages

    @property
    def turn(self) -> int:
        """Number of the turn that is in progress or comes next."""
        return self.turns + 1

    def append(self, base: int, tokens: bytes, when: float) -> None:
        """Commit a turn: keep the first `base` tokens, then add `tokens` (int32 each)."""
        del self.tokens[base:]
        self.tokens.frombytes(tokens)
        self.turns += 1
        self.last_base = base
        self.last_use = when


class Opened(msgspec.Struct, array_like=True):
    """The constant fields of a session."""

    id: str
    tenant: str
    salt: str
    ttl_s: int
    created: float  # s since 1970


class SessionFiles:
    """One directory. The kv stage is its only writer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fault = points.fault_point("disk", "sessions")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, tenant: str, session_id: str) -> Path:
        """File of a session. Its name is a hash, because clients choose ids and may use any characters."""
        key = f"{len(tenant)}:{tenant}:{session_id}".encode("utf-8", "surrogatepass")
        return self.directory / (hashlib.sha256(key).hexdigest()[:40] + SUFFIX)

    # -------------------------------------------------------------- writing

    def create(self, session: Session) -> None:
        """Create a session's file. Raises `OSError`: then there is none."""
        path = self.path(session.tenant, session.id)
        opened = Opened(session.id, session.tenant, session.salt, session.ttl_s, session.created)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._trigger_fault()
            PAYLOAD_CHECKED.append(fd, 0, _OPENED, msgspec.msgpack.encode(opened))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def append(self, session: Session, base: int, tokens: array[int], now: float) -> None:
        """Append a turn. Raises `OSError`: then the file is as before."""
        fd = os.open(self.path(session.tenant, session.id), os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._trigger_fault()
            payload = _TURN.pack(now, base) + tokens.tobytes()
            PAYLOAD_CHECKED.append(fd, os.fstat(fd).st_size, _COMMITTED, payload)
        finally:
            os.close(fd)

    def _trigger_fault(self) -> None:
        if self._fault.trigger is not None:
            self._fault.trigger(0)

    def remove(self, session: Session) -> None:
        """Remove a session's file, if it exists."""
        self.path(session.tenant, session.id).unlink(missing_ok=True)

    # -------------------------------------------------------------- reading

    def load(self) -> Iterator[Session]:
        """Yield every session with all committed turns."""
        for path in sorted(self.directory.glob("*" + SUFFIX)):
            try:
                session = self._load(path)
            except OSError as error:
                log.error("%s cannot be read: %s", path, error.strerror)
                continue
            if session is None:
                log.warning("%s is not a session and was removed", path)
                path.unlink(missing_ok=True)
            else:
                yield session

    def _load(self, path: Path) -> Session | None:
        raw = path.read_bytes()
        session, n_intact = parse(raw)
        if session is None or self.path(session.tenant, session.id) != path:
            return None
        if n_intact < len(raw):
            log.warning("%s: the last %d bytes are damaged and were cut off", path, len(raw) - n_intact)
            os.truncate(path, n_intact)
        return session


def parse(raw: bytes) -> tuple[Session | None, int]:
    """Return the session in a file's bytes, and the number of intact bytes."""
    session: Session | None = None
    n_intact = 0
    for record in PAYLOAD_CHECKED.decode(raw):
        payload = record.payload
        if record.kind == _OPENED and session is None:
            try:
                opened = msgspec.msgpack.decode(payload, type=Opened)
            except msgspec.MsgspecError:
                break
            session = Session(opened.id, opened.tenant, opened.salt, opened.ttl_s, opened.created, opened.created)
        elif record.kind == _COMMITTED and session is not None and len(payload) >= _TURN.size:
            when, base = _TURN.unpack_from(payload)
            if base > len(session.tokens) or (len(payload) - _TURN.size) % 4:
                break
            session.append(base, payload[_TURN.size :], when)
        else:
            break
        n_intact = record.end
    return session, n_intact
