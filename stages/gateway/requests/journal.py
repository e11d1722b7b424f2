"""The journal of requests in flight: what a gateway that is killed leaves to its successor.

    file     magic (8 bytes), records
    record   length u32, kind u32, XXH3-64 of (length, kind, payload), payload
    kind 1   msgpack of `Opened`: written before the request's sequences are submitted
    kind 2   msgpack of `Ended`: it will not be begun again, unless somebody asks for its answer

Tokens are not in it: the answer is determined, so it is generated again from what is here.  A record is
with the kernel when `open` returns, and outlives any process; `sync` makes it outlive the machine's power.
What a crash or a bad disk has left is recognised by length and checksum: everything before the first
damage is believed, nothing from there on.  Ended requests go when the file is rewritten: at its bound, and
at every start; the new file takes the old one's place by a rename.  Never fatal: a full disk or a full
journal leaves a request out of it, and that is counted.

In memory are the records of requests in flight; of one that has ended only where its record stands in the file.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from pipeline.faults import points
from pipeline.files import DurableFile, append_all, write_all
from pipeline.protocol.messages import Sampling
from stages.gateway.endpoints.generation_request import GenerationRequest

log = logging.getLogger("starling.gateway.journal")

MAGIC = b"STRLJNL1"
FILE, FRESH = "requests.journal", "requests.new"
KEEP_S = 120.0  # an ended request may be asked for so long
MAX_KEPT = 256  # ended requests, the latest; a reader comes soon or not at all

_RECORD = struct.Struct("<IIQ")
_SIGNED = struct.Struct("<II")
_OPENED, _ENDED = 1, 2


class Line(msgspec.Struct, array_like=True):
    """A sequence as it was submitted. `prompt` counts in `Opened.prompts`."""

    prompt: int  # as bytes: equal ones stand there once
    prompt_index: int  # of the request
    choice: int
    max_tokens: int
    sampling: Sampling  # with the drawn seed
    stop_ids: tuple[int, ...]


class Opened(msgspec.Struct, array_like=True):
    """All that determines an answer, and how it is told. Times are s since 1970."""

    id: str
    tenant: str
    model: str
    digest: str  # of the model's GGUF file
    numerics: int  # version of the arithmetic
    ask: GenerationRequest  # without its prompts: they stand below as they were submitted
    seed: int
    created: int
    fingerprint: str
    deadline: float
    priority: int
    client_id: str
    prompts: list[bytes]  # token ids, i32 little-endian
    echoes: list[str]
    lines: list[Line]
    instance: str = ""  # the version of the model that it was begun on
    tokenizer: str = ""  # digest of its tokenizer: a reader may come before the tokenizer has told it again


class Ended(msgspec.Struct, array_like=True):
    """`code` of the error that ended it; "" when it was answered; "ABANDONED" when nobody wanted it."""

    id: str
    when: float  # s since 1970
    code: str = ""
    message: str = ""


class Entry(NamedTuple):
    """What the journal knows of a request."""

    opened: Opened
    ended: Ended | None


class _Place(msgspec.Struct, gc=False):
    """Where in the file a request's records are."""

    at: int  # of `opened`
    length: int
    opened: bytes  # the whole record while the request is in flight; then b"", and it is read when it is wanted
    ended: bytes = b""
    ended_at: float = 0.0

    @property
    def size(self) -> int:
        return self.length + len(self.ended)


class Journal(DurableFile):
    """One directory; its one writer is the gateway. `wall()` is s since 1970."""

    def __init__(self, directory: Path, max_bytes: int, wall: Callable[[], float]) -> None:
        """Read what is there and rewrite it. Raises `OSError` when there can be no journal."""
        super().__init__()
        self.directory = directory
        self.max_bytes = max_bytes
        self.left_out = 0  # requests that are not in it, or whose end is not
        self._entries: list[Entry] = []  # found at the start, in their order
        self._wall = wall
        self._fault = points.fault_point("disk", "journal")
        self._places: dict[str, _Place] = {}
        self._ended: dict[str, None] = {}  # those of them that have ended, in that order
        self._size = 0
        self._live = 0  # bytes of what a rewriting would keep
        self._has_complained = False
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        sound = self._read()
        try:
            self._rewrite()
        except OSError as error:
            if not sound:
                raise
            log.error("%s cannot be rewritten: %s", self.path, error.strerror)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            self._size = sound
            os.ftruncate(self._fd, sound)
        for name in self._ended:
            self._places[name].opened = b""

    @property
    def path(self) -> Path:
        return self.directory / FILE

    def take_entries(self) -> list[Entry]:
        """What was found at the start, in its order. Once: they are the caller's from then on."""
        entries, self._entries = self._entries, []
        return entries

    # -------------------------------------------------------------- writing

    def open(self, opened: Opened) -> bool:
        """Enter a request. False: it goes on without."""
        try:
            record = encode(_OPENED, opened)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            return self._leave_out(f"it cannot be encoded: {error}")
        if not self._append(record):
            return False
        self._forget(opened.id)
        self._places[opened.id] = _Place(self._size - len(record), len(record), record)
        self._live += len(record)
        return True

    def end(self, ended: Ended, is_kept: bool) -> None:
        """The request is over; `is_kept`: its answer may be asked for after a restart."""
        place = self._places.get(ended.id)
        if place is None or place.ended:
            return
        record = encode(_ENDED, ended)
        # Entered first: a file that is rewritten on the way has it.
        self._enter_end(ended, place, record)
        if not is_kept:
            self._forget(ended.id)
        self._append(record)
        place.opened = b""
        self._expire()

    def _append(self, record: bytes) -> bool:
        try:
            if self._size + len(record) > self.max_bytes:
                self._expire()
                # Rewriting what cannot shrink would be done again for every record.
                most = self.max_bytes * 3 // 4 - len(MAGIC) - len(record)
                while self._live > most and self._ended:  # those in flight go first
                    self._forget(next(iter(self._ended)))
                if self._live > most:
                    return self._leave_out(f"{self._live} bytes of it are in use, the bound is {self.max_bytes}")
                self._rewrite()
            if self._fd < 0:
                return self._leave_out("it is closed")
            if self._fault.trigger is not None:
                self._fault.trigger(0)
            append_all(self._fd, record, self._size)
        except OSError as error:
            return self._leave_out(error.strerror or str(error))
        self._size += len(record)
        self._is_dirty = True
        self._has_complained = False
        return True

    def _leave_out(self, reason: str) -> bool:
        self.left_out += 1
        if not self._has_complained:
            self._has_complained = True
            log.error("requests go on without the journal %s: %s", self.path, reason)
        return False

    # -------------------------------------------------------------- rewriting

    def _forget(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            self._ended.pop(request_id, None)
            self._live -= place.size

    def _enter_end(self, ended: Ended, place: _Place, record: bytes) -> None:
        place.ended, place.ended_at = record, ended.when
        self._ended[ended.id] = None
        self._live += len(record)

    def _expire(self) -> None:
        oldest = self._wall() - KEEP_S
        while self._ended:
            name = next(iter(self._ended))
            if len(self._ended) <= MAX_KEPT and self._places[name].ended_at >= oldest:
                return
            self._forget(name)

    def _record(self, place: _Place) -> bytes:
        """`opened` from the file, of a request that has ended; b"" when it is damaged there."""
        record = os.pread(self._fd, place.length, place.at)
        return record if is_sound(record) else b""

    def _rewrite(self) -> None:
        """What is still wanted into a new file. Raises `OSError`: then the old one is as it was."""
        self._expire()
        fresh = self.directory / FRESH
        places: dict[str, int] = {}
        pieces, size = [MAGIC], len(MAGIC)
        for name, place in self._places.items():
            if record := place.opened or self._record(place):
                places[name] = size
                pieces += record, place.ended
                size += len(record) + len(place.ended)
        data = b"".join(pieces)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, data, 0)
            os.fdatasync(fd)
            os.rename(fresh, self.path)
        except OSError:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        self.close()
        self._fd, self._size = fd, size
        for name in [name for name in self._places if name not in places]:
            self._forget(name)
        for name, at in places.items():
            self._places[name].at = at

    # -------------------------------------------------------------- reading

    def _read(self) -> int:
        """Fill `_entries`; the bytes of the file that are sound."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        found: dict[str, Entry] = {}
        sound = len(MAGIC) if raw.startswith(MAGIC) else 0
        for record, value, end in parse(raw):
            sound = end
            if isinstance(value, Opened):
                self._forget(value.id)
                found[value.id] = Entry(value, None)
                self._places[value.id] = _Place(end - len(record), len(record), record)
                self._live += len(record)
            elif value.id in found and not self._places[value.id].ended:
                found[value.id] = Entry(found[value.id].opened, value)
                self._enter_end(value, self._places[value.id], record)
                if value.code == "ABANDONED":
                    self._forget(value.id)
                    del found[value.id]
        self._expire()
        self._entries = [entry for name, entry in found.items() if name in self._places]
        if sound < len(raw):
            log.warning("%s: the last %d bytes are damaged and were dropped", self.path, len(raw) - sound)
        return sound


def encode(kind: int, value: Opened | Ended) -> bytes:
    payload = msgspec.msgpack.encode(value)
    return _RECORD.pack(len(payload), kind, _check(len(payload), kind, payload)) + payload


def parse(raw: bytes) -> Iterator[tuple[bytes, Opened | Ended, int]]:
    """Each sound record up to the first damage: its bytes, its meaning, and where it ends."""
    if not raw.startswith(MAGIC):
        return
    at = len(MAGIC)
    while at + _RECORD.size <= len(raw):
        length, kind, check = _RECORD.unpack_from(raw, at)
        end = at + _RECORD.size + length
        payload = raw[at + _RECORD.size : end]
        if end > len(raw) or _check(length, kind, payload) != check:
            return
        value: Opened | Ended
        try:
            if kind == _OPENED:
                value = msgspec.msgpack.decode(payload, type=Opened)
            elif kind == _ENDED:
                value = msgspec.msgpack.decode(payload, type=Ended)
            else:
                return
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        yield raw[at:end], value, end
        at = end


def is_sound(record: bytes) -> bool:
    """Is it one whole record, with its checksum?"""
    if len(record) < _RECORD.size:
        return False
    length, kind, check = _RECORD.unpack_from(record, 0)
    payload = record[_RECORD.size :]
    return len(payload) == length and _check(length, kind, payload) == check


def _check(length: int, kind: int, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_SIGNED.pack(length, kind) + payload)
