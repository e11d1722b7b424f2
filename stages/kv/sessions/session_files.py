"""The sessions of one model on disk: a file for each, appended to, never rewritten.

    record   length u32, kind u32, XXH3-64 of the payload, payload
    kind 1   msgpack of `Opened`: the first record
    kind 2   a turn: when (f64, s since 1970), base (u32), tokens (int32 each)

A record is durable (`fdatasync`) before anybody is told of it.  What a crash has left at the end of a file
is recognised by length and checksum and cut off; a file without a sound first record is removed.  A
full disk refuses the turn and leaves the session as it was.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from pipeline.faults import points
from pipeline.files import write_all
from stages.kv.sessions.session import Session

log = logging.getLogger("starling.kv")

SUFFIX = ".session"
_RECORD = struct.Struct("<IIQ")
_TURN = struct.Struct("<dI")
_OPENED, _COMMITTED = 1, 2
_MAX_PAYLOAD = 64 << 20


class Opened(msgspec.Struct, array_like=True):
    """What a session is."""

    id: str
    tenant: str
    salt: str
    ttl_s: int
    created: float  # s since 1970


class SessionFiles:
    """One directory; its one writer is the kv stage."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fault = points.fault_point("disk", "sessions")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, tenant: str, session_id: str) -> Path:
        """Named by a digest: ids come from clients and may hold anything."""
        key = f"{len(tenant)}:{tenant}:{session_id}".encode("utf-8", "surrogatepass")
        return self.directory / (hashlib.sha256(key).hexdigest()[:40] + SUFFIX)

    # -------------------------------------------------------------- writing

    def create(self, session: Session) -> None:
        """Raises `OSError`: then there is none."""
        path = self.path(session.tenant, session.id)
        opened = Opened(session.id, session.tenant, session.salt, session.ttl_s, session.created)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._strike()
            _append(fd, 0, _OPENED, msgspec.msgpack.encode(opened))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def append(self, session: Session, base: int, tokens: array[int], now: float) -> None:
        """One turn. Raises `OSError`: then the file is as before."""
        fd = os.open(self.path(session.tenant, session.id), os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._strike()
            _append(fd, os.fstat(fd).st_size, _COMMITTED, _TURN.pack(now, base) + tokens.tobytes())
        finally:
            os.close(fd)

    def _strike(self) -> None:
        if self._fault.trigger is not None:
            self._fault.trigger(0)

    def remove(self, session: Session) -> None:
        self.path(session.tenant, session.id).unlink(missing_ok=True)

    # -------------------------------------------------------------- reading

    def load(self) -> Iterator[Session]:
        """Every session that is there, with all turns that were committed."""
        for path in sorted(self.directory.glob("*" + SUFFIX)):
            try:
                session = self._load(path)
            except OSError as error:
                log.error("%s cannot be read: %s", path, error.strerror)
                continue
            if session is None:
                log.warning("%s is no session and was removed", path)
                path.unlink(missing_ok=True)
            else:
                yield session

    def _load(self, path: Path) -> Session | None:
        raw = path.read_bytes()
        session, good = parse(raw)
        if session is None or self.path(session.tenant, session.id) != path:
            return None
        if good < len(raw):
            log.warning("%s: the last %d bytes are damaged and were cut off", path, len(raw) - good)
            os.truncate(path, good)
        return session


def parse(raw: bytes) -> tuple[Session | None, int]:
    """The session in a file's bytes, and how many of them are sound."""
    session: Session | None = None
    at = 0
    while at + _RECORD.size <= len(raw):
        length, kind, check = _RECORD.unpack_from(raw, at)
        payload = raw[at + _RECORD.size : at + _RECORD.size + length]
        if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != check:
            break
        if kind == _OPENED and session is None:
            try:
                opened = msgspec.msgpack.decode(payload, type=Opened)
            except msgspec.MsgspecError:
                break
            session = Session(opened.id, opened.tenant, opened.salt, opened.ttl_s, opened.created, opened.created)
        elif kind == _COMMITTED and session is not None and length >= _TURN.size:
            when, base = _TURN.unpack_from(payload)
            if base > len(session.tokens) or (length - _TURN.size) % 4:
                break
            session.append(base, payload[_TURN.size :], when)
        else:
            break
        at += _RECORD.size + length
    return session, at


def _append(fd: int, size: int, kind: int, payload: bytes) -> None:
    record = _RECORD.pack(len(payload), kind, xxhash.xxh3_64_intdigest(payload)) + payload
    try:
        write_all(fd, record, size)
        os.fdatasync(fd)
    except OSError:
        os.ftruncate(fd, size)
        raise
