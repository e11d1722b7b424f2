"""Session files: loaded by a starting kv stage, continued by a turn, and loaded again.

byte 0   bit 0: the rest is the file. Otherwise it is parts: a byte for the kind of a record, and its payload
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator

import msgspec

from pipeline.errors import Conflict, StarlingError
from pipeline.record_file import PAYLOAD_CHECKED
from shm.prefix_hash import PageHash
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_files import Opened, SessionFiles, parse
from stages.kv.sessions.session_store import SessionStore
from tools.fuzz.parts import join, scratch, split
from tools.fuzz.target import Target

NOW = 1e9


def _store() -> SessionStore:
    files = SessionFiles(scratch() / "sessions")
    return SessionStore(files, lambda salt: PageHash(bytes(16)), 16, SessionBounds(8, 1000), clock=lambda: NOW)


def run(data: bytes) -> None:
    """Load the file under the name that belongs to its contents, and commit a turn."""
    raw = data[1:]
    if data[:1] and not data[0] & 1:
        raw = b"".join(PAYLOAD_CHECKED.encode(part[0], part[1:]) for part in split(raw) if part)
    directory = scratch() / "sessions"
    shutil.rmtree(directory, ignore_errors=True)
    files = SessionFiles(directory)
    session, n_intact = parse(raw)
    assert 0 <= n_intact <= len(raw)
    path = files.path(session.tenant, session.id) if session is not None else directory / "x.session"
    path.write_bytes(raw)
    store = _store()
    store.check()
    assert len(store) == (session is not None)
    if session is None:
        assert not path.exists()
        return
    assert path.exists()
    store.expire()
    if not len(store):
        return
    if n_intact < len(raw):  # refused once
        try:
            store.begin(b"peer", session.tenant, session.id)
        except Conflict:
            pass
        else:
            raise AssertionError("the loss of turns was not reported")
    held = store.begin(b"peer", session.tenant, session.id)
    assert held.tokens == session.tokens
    turn = held.turn
    try:
        store.commit(b"peer", session.tenant, session.id, turn, 0, b"\1\0\0\0" * 20)
    except StarlingError:  # more tokens than a session may hold
        return
    store.check()
    again = _store().begin(b"peer", session.tenant, session.id)
    assert (again.turn, list(again.tokens)) == (turn + 1, [1] * 20)


def seeds() -> Iterator[bytes]:
    """A session without turns, one of several turns, and a damaged end."""
    opened = b"\1" + msgspec.msgpack.encode(Opened("sess-1", "tenant", "salt", 3600, NOW - 5))
    turns = [
        b"\2" + struct.pack("<dI", NOW - 3 + i, base) + b"\5\0\0\0" * n
        for i, (base, n) in enumerate([(0, 40), (32, 9)])
    ]
    yield b"\0" + join([opened])
    yield b"\0" + join([opened, *turns])
    records = b"".join(PAYLOAD_CHECKED.encode(part[0], part[1:]) for part in (opened, *turns))
    yield b"\1" + records
    yield b"\1" + records[:-3]


TARGET = Target(
    run,
    seeds,
    errors=(),
    modules=("pipeline.record_file", "stages.kv.sessions.session_files", "stages.kv.sessions.session_store"),
)
