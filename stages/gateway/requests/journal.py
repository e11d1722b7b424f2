"""The journal of requests in flight: what a killed gateway leaves to its successor.

    file     magic (8 bytes), records
    record   length u32, kind u32, XXH3-64 of (length, kind, payload), payload
    kind 1   msgpack of `RequestSpec`: written before the request's sequences are submitted
    kind 2   msgpack of `RequestEnd`: the request is not started again unless a client asks for its answer

The journal has no tokens: an answer is determined by its `RequestSpec`, so it is generated again from that. When
`open` returns, the kernel has the record, and it survives the death of any process; `sync` makes it survive a power
failure. Length and checksum reveal what a crash or a bad disk has damaged: records before the first damage count,
everything after it is dropped. A second end, "ABANDONED", drops an answer. The file is rewritten, without expired
requests, when it reaches its bound and at every start; the new file replaces the old one by a rename. The journal is
never fatal: when the disk, the journal or a tenant's part of it is full, a request is left out, and that is counted.

In memory are the records of requests in flight. Of an ended request only the position of its record is in memory.
Answered requests with an idempotency key are pinned: they stay, while there is room, until `forget`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline.faults import points
from pipeline.files import DiskErrors, DurableFile, append_all, make_directory, replace_file
from pipeline.record_file import HEAD_CHECKED
from shm.decoding import DECODE_ERRORS
from stages.gateway.requests.spec import RequestSpec

log = logging.getLogger("starling.gateway.journal")

MAGIC = b"STRLJNL1"
FILE = "requests.journal"
UNREADABLE_FILE = "requests.unreadable"  # the last journal that could not be read
KEEP_S = 120.0  # how long a client may ask for the answer of an ended request
REOPEN_S = 5.0  # between attempts to open a journal that could not be opened
PART_LOG_S = 60.0  # between log lines about tenants whose part is full
MAX_ENDED = 256  # ended requests that are stored, the latest of each tenant: readers reconnect soon or not at all

_SPEC, _END = 1, 2  # kinds of records


class RequestEnd(msgspec.Struct, array_like=True):
    """How a request ended. `code`: of its error; "": it was answered; "ABANDONED": the client disconnected."""

    id: str
    when: float  # s since 1970
    code: str = ""
    message: str = ""


class JournalEntry(NamedTuple):
    """A request that was found in the journal; `end` is None if it was in flight."""

    spec: RequestSpec
    end: RequestEnd | None


class _Location(msgspec.Struct, gc=False):
    """Where a request's records are in the file."""

    tenant: str
    at: int  # offset of the `RequestSpec` record
    length: int
    spec_record: bytes  # the whole record while the request is in flight; then b"", and it is read from the file
    end_record: bytes = b""
    ended_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of both records."""
        return self.length + len(self.end_record)


class Journal(DurableFile):
    """One directory with one writer, the gateway. `wall()` returns seconds since 1970, `clock()` any that only grow."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        wall: Callable[[], float],
        part_of: Callable[[str, int], int] = lambda tenant, total: total,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the journal and rewrite it. Never raises `OSError`.

        If it cannot be read, it is renamed and a new one begins; if it cannot be written, requests are left out of
        it until it can. `part_of` returns how much of a total may be of a tenant's requests in flight; requests that
        are found in the file stay in any case.
        """
        super().__init__()
        self.directory = directory
        self.max_bytes = max_bytes
        self.left_out = 0  # requests that are not in the journal, or whose end is not
        self.unreadable = 0  # journals that could not be read and were renamed
        self._is_unreadable = False  # the file at `path` could not be read and is yet to be renamed
        self._entries: list[JournalEntry] = []  # found at the start, in order
        self._wall = wall
        self._part_of = part_of
        self._clock = clock
        self._points = points.DiskPoints("journal")
        self._locations: dict[str, _Location] = {}
        self._ended: dict[str, None] = {}  # ids of ended requests, in order of their end
        self._ended_of: dict[str, dict[str, None]] = {}  # the same, by tenant
        self._pinned: dict[str, None] = {}  # the same, of answered requests with an idempotency key
        self._size = 0
        self._live = 0  # bytes that a rewritten file would have
        self._in_flight: Counter[str] = Counter()  # of them, of requests in flight, by tenant
        self.errors = DiskErrors(log, "requests continue without the journal")
        self._has_complained = False  # of a journal that is full or closed
        self._is_closed = False
        self._next_reopen = self._next_part_log = 0.0  # s of the monotonic clock
        sound = 0
        try:
            sound = self._read()
        except OSError as error:
            self._is_unreadable = True
            self.errors.count += 1
            log.error(
                "the journal cannot be read: requests that were in flight are lost",
                extra={"path": str(self.path), "reason": error.strerror or str(error), "kept_as": UNREADABLE_FILE},
            )
        try:
            self._rewrite()
        except OSError as error:
            self.errors.count += 1
            log.error("the journal cannot be rewritten", extra={"path": str(self.path), "reason": error.strerror})
            self._continue_old(sound)
        if self._fd >= 0:
            for name in (*self._ended, *self._pinned):
                self._locations[name].spec_record = b""

    def close(self) -> None:
        """Idempotent. Requests are left out afterwards."""
        self._is_closed = True
        super().close()

    def _continue_old(self, sound: int) -> None:
        """Append to the file as it is, of which `sound` bytes count. It stays closed if that is impossible."""
        if not sound:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(fd, sound)
            except OSError:
                os.close(fd)
                raise
            self._fd, self._size = fd, sound

    @property
    def path(self) -> Path:
        """The journal's file."""
        return self.directory / FILE

    @property
    def _most_live(self) -> int:
        """Most bytes of a rewritten file. If it could not shrink so far it would be rewritten for every record."""
        return self.max_bytes * 3 // 4

    def take_entries(self) -> list[JournalEntry]:
        """The entries found at the start, in order. A second call returns none."""
        entries, self._entries = self._entries, []
        return entries

    # -------------------------------------------------------------- writing

    def open(self, spec: RequestSpec) -> bool:
        """Write a request. False: it could not be written, and the request continues without the journal."""
        try:
            record = encode(_SPEC, spec)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            return self._leave_out(f"it cannot be encoded: {error}")
        part, held = self._part_of(spec.tenant, self._most_live), self._in_flight[spec.tenant]
        if part < self._most_live and held + len(record) > part:
            return self._leave_out_of_part(spec.tenant, held, part)
        if not self._append(record):
            return False
        self.forget(spec.id)
        self._register(spec, self._size - len(record), record)
        return True

    def end(self, end: RequestEnd, is_kept: bool, is_pinned: bool = False) -> None:
        """Write the end of a request. `is_kept`: clients may ask for its answer after a restart.

        `is_pinned`: until `forget` is called.
        """
        location = self._locations.get(end.id)
        if location is None or location.end_record:
            return
        record = encode(_END, end)
        # Registered before it is written, so that `_append` includes it if it rewrites the file.
        self._register_end(end, location, record, is_pinned)
        if not is_kept:
            self.forget(end.id)
        self._append(record)
        location.spec_record = b""
        self._expire()

    def drop(self, request_id: str) -> None:
        """Drop a request that has ended, also for a successor. Does nothing if it is unknown."""
        if request_id in self._locations:
            self.forget(request_id)
            self._append(encode(_END, RequestEnd(request_id, self._wall(), "ABANDONED")))

    def _append(self, record: bytes) -> bool:
        try:
            if self._size + len(record) > self.max_bytes:
                self._expire()
                most = self._most_live - len(MAGIC) - len(record)
                if self._live > most:
                    self._make_room(most)
                if self._live > most:
                    return self._leave_out(f"{self._live} bytes of it are in use, the bound is {self.max_bytes}")
                self._rewrite()
            if self._is_closed:
                return self._leave_out("it is closed")
            if self._fd < 0:
                if self._clock() < self._next_reopen:
                    self.left_out += 1
                    return False
                self._next_reopen = self._clock() + REOPEN_S
                self._rewrite()
            self._points.write.hit()
            append_all(self._fd, record, self._size)
        except OSError as error:
            self.left_out += 1
            self.errors.failed("write", self.path, error)
            return False
        self.errors.worked("write")
        self._size += len(record)
        self._is_dirty = True
        self._has_complained = False
        return True

    def _make_room(self, most: int) -> None:
        """Forget ended requests, the oldest first, until at most `most` bytes are live.

        Those of tenants that have more than their part come first, so that none drives out what others have.
        """
        excess: Counter[str] = Counter()  # bytes beyond the part, by tenant
        for location in self._locations.values():
            excess[location.tenant] += location.size
        for tenant in excess:
            excess[tenant] -= self._part_of(tenant, self._most_live)
        for is_within_part in (False, True):
            for name in (*self._ended, *self._pinned):
                if self._live <= most:
                    return
                location = self._locations[name]
                if is_within_part or excess[location.tenant] > 0:
                    excess[location.tenant] -= location.size
                    self.forget(name)

    def _leave_out(self, reason: str) -> bool:
        self.left_out += 1
        if not self._has_complained:
            self._has_complained = True
            log.error("requests continue without the journal", extra={"path": str(self.path), "reason": reason})
        return False

    def _leave_out_of_part(self, tenant: str, held: int, part: int) -> bool:
        self.left_out += 1
        if self._clock() >= self._next_part_log:
            self._next_part_log = self._clock() + PART_LOG_S
            reason = f"{held} bytes of it are in use by the tenant's requests in flight, a tenant's part is {part}"
            extra = {"path": str(self.path), "tenant": tenant, "reason": reason}
            log.error("requests of a tenant continue without the journal", extra=extra)
        return False

    # -------------------------------------------------------------- rewriting

    def forget(self, request_id: str) -> None:
        """Leave a request out of the next file. Does nothing if it is unknown."""
        location = self._locations.pop(request_id, None)
        if location is not None:
            if request_id in self._ended:
                self._forget_ended(request_id, location.tenant)
            self._pinned.pop(request_id, None)
            self._live -= location.size
            if not location.end_record:
                self._count_in_flight(location.tenant, -location.length)

    def _forget_ended(self, request_id: str, tenant: str) -> None:
        del self._ended[request_id]
        del self._ended_of[tenant][request_id]
        if not self._ended_of[tenant]:
            del self._ended_of[tenant]

    def _register(self, spec: RequestSpec, at: int, record: bytes) -> None:
        self._locations[spec.id] = _Location(spec.tenant, at, len(record), record)
        self._live += len(record)
        self._count_in_flight(spec.tenant, len(record))

    def _count_in_flight(self, tenant: str, change: int) -> None:
        self._in_flight[tenant] += change
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]

    def _register_end(self, end: RequestEnd, location: _Location, record: bytes, is_pinned: bool) -> None:
        self._count_in_flight(location.tenant, -location.length)
        location.end_record, location.ended_at = record, end.when
        if is_pinned:
            self._pinned[end.id] = None
        else:
            self._ended[end.id] = self._ended_of.setdefault(location.tenant, {})[end.id] = None
        self._live += len(record)

    def _expire(self) -> None:
        """Forget ended requests that are too old, and if there are too many, the oldest of the tenant that has most.

        So does the replay buffer: no tenant can drive out the requests of the others.
        """
        oldest = self._wall() - KEEP_S
        while self._ended and self._locations[name := next(iter(self._ended))].ended_at < oldest:
            self.forget(name)
        while len(self._ended) > MAX_ENDED:
            largest = max(self._ended_of.values(), key=len)
            self.forget(next(iter(largest)))

    def _read_spec_record(self, location: _Location) -> bytes:
        """The record of an ended request from the file; b"" if it is damaged."""
        if self._fd < 0:
            return b""
        record = os.pread(self._fd, location.length, location.at)
        return record if is_sound(record) else b""

    def _rewrite(self) -> None:
        """Write all live records to a new file. Raises `OSError`; the old file is then unchanged."""
        self._expire()
        offsets: dict[str, int] = {}
        parts, size = [MAGIC], len(MAGIC)
        for name, location in self._locations.items():
            if record := location.spec_record or self._read_spec_record(location):
                offsets[name] = size
                parts += record, location.end_record
                size += len(record) + len(location.end_record)
        data = b"".join(parts)
        make_directory(self.directory)
        replace_file(self.path, data, durable=True, mode=0o600, before=self._before)
        super().close()  # the old file has no name any more
        self._fd, self._size = os.open(self.path, os.O_RDWR | os.O_CLOEXEC), size
        for name in [name for name in self._locations if name not in offsets]:
            self.forget(name)
        for name, at in offsets.items():
            self._locations[name].at = at

    def _before(self, operation: str) -> None:
        """The fault points of a rewrite."""
        match operation:
            case "open":
                self._points.open.hit()
            case "sync":
                self._points.sync.hit()
            case "rename":
                self._points.rename.hit()
                if self._is_unreadable:
                    self._rename_unreadable()

    def _rename_unreadable(self) -> None:
        """Rename the file that could not be read. Raises `OSError`."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, self.directory / UNREADABLE_FILE)
            self.unreadable += 1
        self._is_unreadable = False

    # -------------------------------------------------------------- reading

    def _read(self) -> int:
        """Fill `_entries`. Returns the number of sound bytes."""
        self._points.read.hit()
        try:
            raw = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return 0
        found: dict[str, JournalEntry] = {}
        sound = len(MAGIC) if raw.startswith(MAGIC) else 0
        for record, value, end in parse(raw):
            sound = end
            if isinstance(value, RequestSpec):
                self.forget(value.id)
                found[value.id] = JournalEntry(value, None)
                self._register(value, end - len(record), record)
            elif value.id in found:
                if not self._locations[value.id].end_record:
                    found[value.id] = JournalEntry(found[value.id].spec, value)
                    is_pinned = bool(found[value.id].spec.idempotency_key) and not value.code
                    self._register_end(value, self._locations[value.id], record, is_pinned)
                if value.code == "ABANDONED":
                    self.forget(value.id)
                    del found[value.id]
        self._expire()
        self._entries = [entry for name, entry in found.items() if name in self._locations]
        if sound < len(raw):
            log.warning(
                "the end of the journal is damaged and was dropped",
                extra={"path": str(self.path), "bytes": len(raw) - sound},
            )
        return sound


def encode(kind: int, value: RequestSpec | RequestEnd) -> bytes:
    """One record."""
    return HEAD_CHECKED.encode(kind, msgspec.msgpack.encode(value))


def parse(raw: bytes) -> Iterator[tuple[bytes, RequestSpec | RequestEnd, int]]:
    """Each sound record up to the first damage: its bytes, its value and the offset of its end."""
    if not raw.startswith(MAGIC):
        return
    for record in HEAD_CHECKED.decode(raw, len(MAGIC)):
        value: RequestSpec | RequestEnd
        try:
            if record.kind == _SPEC:
                value = msgspec.msgpack.decode(record.payload, type=RequestSpec)
                if not value.is_consistent:
                    return
            elif record.kind == _END:
                value = msgspec.msgpack.decode(record.payload, type=RequestEnd)
            else:
                return
        except DECODE_ERRORS:
            return
        yield raw[record.begin : record.end], value, record.end


def is_sound(record: bytes) -> bool:
    """Is it one whole record with a matching checksum?"""
    return any(found.end == len(record) for found in HEAD_CHECKED.decode(record))
