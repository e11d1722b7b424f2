"""A session, and the sessions of one model on disk: one file for each, appended to and never rewritten.

    record   as in pipeline/record_file.py; the checksum covers the payload
    kind 1   msgpack of `Opened`: the first record
    kind 2   a turn: time (f64, s since 1970), base (u32), tokens (int32 each), little-endian
    kind 3   msgpack of `Mark` (session_moves.py): the session has come from another agent, or has gone to one

A record is written before the turn is acknowledged, so the turn survives every process; a thread then synchronizes the
file with the disk, so that it survives a power failure as well.  The turns before the first damaged record count; the
session then reports its loss once (`lost_bytes`).  A file without an intact first record is removed.  On a full or
failing disk the turn is refused and the session stays as it was; a file that cannot be removed is emptied, and removed
later.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pipeline.background_sync import BackgroundSync
from pipeline.faults import points
from pipeline.files import DiskErrors, make_directory, replace_file
from pipeline.record_file import PAYLOAD_CHECKED, RECORD_HEAD_BYTES
from shm.decoding import DECODE_ERRORS
from shm.prefix_hash import PageHash
from stages.kv.sessions.session_moves import HELD, MOVED, SETTLED, Mark, State

log = logging.getLogger("starling.kv")

SUFFIX = ".session"
_TURN = struct.Struct("<dI")
assert _TURN.size == 12
_OPENED, _COMMITTED, _MARKED = 1, 2, 3


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
    file_bytes: int = 0  # of intact records in its file
    lost_bytes: int = 0  # after them: a turn that is damaged or was cut short, and all turns after it
    # Of moves (session_moves.py).
    state: State = HELD
    agent: str = ""  # the other one of its last move
    move: str = ""  # its last move
    changes: int = 0  # of the state, over all agents
    marked: float = 0.0  # when the state changed last, s since 1970
    # When its last turn began, or ended without a commit, s since 1970. Not in its file, and not a part of what moves.
    used: float = field(default=0.0, compare=False)
    # Until then a turn may be in progress of which this process has not heard yet, s since 1970.
    unsure_until: float = field(default=0.0, compare=False)

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
        self.lost_bytes = 0

    def mark(self, mark: Mark) -> None:
        """Change the state. A session that has moved has no tokens."""
        self.state, self.agent, self.move = mark.state, mark.agent, mark.move
        self.turns, self.changes, self.marked = mark.turns, mark.changes, mark.at
        if mark.state in (MOVED, SETTLED):
            del self.tokens[:]


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
        """Create the directory. Raises `OSError`."""
        self.directory = directory
        self.errors = DiskErrors(log, "turns of sessions are refused, or the files of ended ones stay")
        self.damaged = 0  # sessions that lost turns, or all of them, since the process started
        self._points = points.DiskPoints("sessions")
        self._unremoved: dict[Path, None] = {}  # files of ended sessions that could not be removed
        self._unread: set[Path] = set()  # files that could not be read
        self._sync = BackgroundSync(self.errors, self._points.sync.hit)
        self._points.open.hit()
        make_directory(directory)

    def path(self, tenant: str, session_id: str) -> Path:
        """File of a session. Its name is a hash, because clients choose ids and may use any characters."""
        key = f"{len(tenant)}:{tenant}:{session_id}".encode("utf-8", "surrogatepass")
        return self.directory / (hashlib.sha256(key).hexdigest()[:40] + SUFFIX)

    # -------------------------------------------------------------- writing

    def create(self, session: Session) -> None:
        """Create a session's file. Raises `OSError`: then there is none, or one that `load` removes."""
        path = self.path(session.tenant, session.id)
        assert path not in self._unread, "a session that could not be read would be lost"
        opened = Opened(session.id, session.tenant, session.salt, session.ttl_s, session.created)
        try:
            make_directory(self.directory)  # prune.py removes empty ones
            fd = self._open(path, os.O_CREAT | os.O_TRUNC)
            self._unremoved.pop(path, None)  # its contents are gone
            try:
                session.file_bytes = self._append(path, fd, 0, _OPENED, msgspec.msgpack.encode(opened))
            finally:
                os.close(fd)
        except OSError as error:
            self.errors.failed("create", path, error)
            self._remove(path)
            raise
        self.errors.worked("create")
        self._sync_directory()

    def _sync_directory(self) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._sync.request(self.directory, fd)
            finally:
                os.close(fd)

    def append(self, session: Session, base: int, tokens: array[int], now: float) -> None:
        """Append a turn. Raises `OSError`: then the turn is not read back."""
        path = self.path(session.tenant, session.id)
        try:
            fd = self._open(path, 0)
            try:
                if os.fstat(fd).st_size > session.file_bytes:  # a turn that failed and could not be cut off
                    os.ftruncate(fd, session.file_bytes)
                payload = _TURN.pack(now, base) + tokens.tobytes()
                session.file_bytes = self._append(path, fd, session.file_bytes, _COMMITTED, payload)
            finally:
                os.close(fd)
        except OSError as error:
            self.errors.failed("append", path, error)
            raise
        self.errors.worked("append")

    def mark(self, session: Session, mark: Mark) -> None:
        """Append a change of the state, on the disk when this returns. Raises `OSError`: then nothing has changed."""
        path = self.path(session.tenant, session.id)
        try:
            fd = self._open(path, 0)
            try:
                if os.fstat(fd).st_size > session.file_bytes:
                    os.ftruncate(fd, session.file_bytes)
                size = self._append(path, fd, session.file_bytes, _MARKED, msgspec.msgpack.encode(mark))
                self._points.sync.hit()
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self.errors.failed("append", path, error)
            # What was written must not be read back, nor be followed by a turn.
            with contextlib.suppress(OSError):
                os.truncate(path, session.file_bytes)
            raise
        session.file_bytes = size
        self.errors.worked("append")

    def replace(self, session: Session, tokens: array[int], mark: Mark) -> None:
        """Write the whole file: these tokens, and the state. On the disk when this returns. Raises `OSError`."""
        path = self.path(session.tenant, session.id)
        assert path not in self._unread, "a session that could not be read would be lost"
        opened = Opened(session.id, session.tenant, session.salt, session.ttl_s, session.created)
        raw = PAYLOAD_CHECKED.encode(_OPENED, msgspec.msgpack.encode(opened))
        raw += PAYLOAD_CHECKED.encode(_COMMITTED, _TURN.pack(session.last_use, 0) + tokens.tobytes())
        raw += PAYLOAD_CHECKED.encode(_MARKED, msgspec.msgpack.encode(mark))
        try:
            make_directory(self.directory)
            self._points.write.hit()
            replace_file(path, raw, durable=True, mode=0o600, before=self._before_replacing)
        except OSError as error:
            self.errors.failed("create", path, error)
            raise
        self._unremoved.pop(path, None)  # its contents are gone
        session.file_bytes = len(raw)
        self.errors.worked("create")

    def _before_replacing(self, operation: str) -> None:
        if operation == "rename":
            self._points.rename.hit()
        elif operation == "sync":
            self._points.sync.hit()
        else:
            self._points.open.hit()

    def _open(self, path: Path, flags: int) -> int:
        self._points.open.hit()
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)

    def _append(self, path: Path, fd: int, size: int, kind: int, payload: bytes) -> int:
        """Append a record; returns the new size of the file."""
        self._points.write.hit()
        PAYLOAD_CHECKED.append(fd, size, kind, payload)
        self._sync.request(path, fd)
        return size + RECORD_HEAD_BYTES + len(payload)

    # -------------------------------------------------------------- removing

    def remove(self, session: Session) -> None:
        """Remove a session's file, if it exists. Never raises: `retry_removals` removes it when the disk allows it."""
        self._remove(self.path(session.tenant, session.id))

    def retry_removals(self) -> None:
        """Remove the files that could not be removed. Never raises."""
        for path in list(self._unremoved):
            if not self._remove(path):
                return  # a disk that fails once will fail for all of them

    def _remove(self, path: Path) -> bool:
        try:
            self._points.unlink.hit()
            path.unlink(missing_ok=True)
        except OSError as error:
            self.errors.failed("unlink", path, error)
            if path not in self._unremoved:
                self._unremoved[path] = None
                # A file without a first record is no session: a restart would otherwise revive this one.
                with contextlib.suppress(OSError):
                    self._points.open.hit()
                    os.truncate(path, 0)
            return False
        self._unremoved.pop(path, None)
        self.errors.worked("unlink")
        self._sync_directory()
        return True

    # -------------------------------------------------------------- reading

    def load(self) -> Iterator[Session]:
        """Yield every session with all committed turns. A file that cannot be read stays. Raises `OSError`."""
        yield from self._load_all(sorted(self.directory.glob("*" + SUFFIX)))

    def load_unread(self) -> Iterator[Session]:
        """Yield the sessions whose files could not be read before and can be read now."""
        yield from self._load_all(sorted(self._unread))

    def is_unread(self, tenant: str, session_id: str) -> bool:
        """Whether the session has a file that could not be read."""
        return bool(self._unread) and self.path(tenant, session_id) in self._unread

    def _load_all(self, paths: list[Path]) -> Iterator[Session]:
        for path in paths:
            try:
                session = self._load(path)
            except OSError as error:
                self._unread.add(path)
                self.errors.failed("read", path, error)
                continue
            self._unread.discard(path)
            self.errors.worked("read")
            if session is None:
                self._remove(path)
            else:
                yield session

    def _load(self, path: Path) -> Session | None:
        self._points.read.hit()
        raw = path.read_bytes()
        session, n_intact = parse(raw)
        if session is None or self.path(session.tenant, session.id) != path:
            if raw:  # an empty file is of an ended session, and could not be removed
                self.damaged += 1
                log.error("a file that is no session is removed", extra={"path": str(path)})
            return None
        session.file_bytes, session.lost_bytes = n_intact, len(raw) - n_intact
        if session.lost_bytes:
            self.damaged += 1
            names = {"tenant": session.tenant, "session_id": session.id}
            facts = {**names, "path": str(path), "lost_bytes": session.lost_bytes, "turns": session.turns}
            log.error("a session has lost turns: its file is damaged", extra=facts)
        return session

    def cut(self, session: Session) -> None:
        """Cut the damaged records off a session's file. Never raises: the next turn overwrites them otherwise."""
        session.lost_bytes = 0
        path = self.path(session.tenant, session.id)
        try:
            self._points.write.hit()
            os.truncate(path, session.file_bytes)
        except OSError as error:
            self.errors.failed("truncate", path, error)
        else:
            self.errors.worked("truncate")


def parse(raw: bytes) -> tuple[Session | None, int]:
    """Return the session in a file's bytes, and the number of intact bytes."""
    session: Session | None = None
    n_intact = 0
    for record in PAYLOAD_CHECKED.decode(raw):
        payload = record.payload
        if record.kind == _OPENED and session is None:
            try:
                opened = msgspec.msgpack.decode(payload, type=Opened)
            except DECODE_ERRORS:
                break
            session = Session(opened.id, opened.tenant, opened.salt, opened.ttl_s, opened.created, opened.created)
        elif record.kind == _MARKED and session is not None:
            try:
                session.mark(msgspec.msgpack.decode(payload, type=Mark))
            except DECODE_ERRORS:
                break
        elif record.kind == _COMMITTED and session is not None and len(payload) >= _TURN.size:
            when, base = _TURN.unpack_from(payload)
            if base > len(session.tokens) or (len(payload) - _TURN.size) % 4:
                break
            session.append(base, payload[_TURN.size :], when)
        else:
            break
        n_intact = record.end
    return session, n_intact
