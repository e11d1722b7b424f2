"""The quota file: the levels of the tenants' buckets on disk, so that they survive a restart.

    0      64  magic "STRLQUO1", zeros
    64 n   64  records: key (16), per_minute i64, level f64, at f64 (s since 1970), zeros (16), XXH3-64 of the 56 before

A stored level overwrites its bucket's record in place.  The record is in the page cache then and survives the process;
`unsynced` reports when the file needs an fsync to survive a power failure as well.  A torn or damaged record is
ignored: its tenant starts with a full bucket.  The file stores digests, not names of tenants.  It holds at most
`MAX_RECORDS` records; a new one replaces the record that was unused for the longest time.  A disk error is not fatal:
the quotas stay in memory, and one log line reports the error.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import xxhash

from pipeline.faults import points
from pipeline.files import DiskErrors, DurableFile, make_directory, sync_directory, write_all

log = logging.getLogger("starling.quotas")

MAGIC = b"STRLQUO1"
MAX_RECORDS = 16_384  # more than those of all keys of a full key file
MAX_LEVEL = 1e12  # of a rate, and of a level in both directions; more is damage
MAX_AT = 1e11  # s since 1970
RECORD_BYTES = 64
_RECORD = struct.Struct("<16sqdd16x")
_CHECK = struct.Struct("<Q")
assert _RECORD.size + _CHECK.size == RECORD_BYTES


class Level(NamedTuple):
    """A bucket when it was last charged, or a count of a day or in all."""

    per_minute: int  # its limit, whatever the period
    level: float  # of a count: what is used
    at: float  # s since 1970


class QuotaFile(DurableFile):
    """The file and its content. It has one writer, the process that holds its stage's lock."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and read it. Raises `OSError`."""
        self.path = path
        self.levels: OrderedDict[bytes, Level] = OrderedDict()  # least recently charged first
        self._record_numbers: dict[bytes, int] = {}
        self._free: list[int] = []
        self.errors = DiskErrors(log, "a restart would reset the quotas")
        self._points = points.DiskPoints("quotas")
        self._points.open.hit()
        make_directory(path.parent)
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._read()
        except OSError:
            self.close()
            raise
        with contextlib.suppress(OSError):  # of use after a power failure only
            sync_directory(path.parent)

    def _read(self) -> None:
        self._points.read.hit()
        raw = os.pread(self._fd, (MAX_RECORDS + 1) * RECORD_BYTES, 0)
        if raw[: len(MAGIC)] != MAGIC:
            if raw:
                log.warning("a quota file is damaged and is replaced by an empty one", extra={"path": str(self.path)})
            os.ftruncate(self._fd, 0)
            write_all(self._fd, MAGIC.ljust(RECORD_BYTES, b"\0"), 0)
            raw = b""
        found: list[tuple[bytes, Level, int]] = []
        for number in range(MAX_RECORDS):
            record = raw[(number + 1) * RECORD_BYTES : (number + 2) * RECORD_BYTES]
            if (level := _parse(record)) is not None:
                found.append((record[:16], level, number))
            else:
                self._free.append(number)
        self._free.reverse()
        for key, level, number in sorted(found, key=lambda one: one[1].at):
            if key in self.levels:  # a bucket has one record: the older one would return at a later start
                older = self._record_numbers[key]
                write_all(self._fd, bytes(RECORD_BYTES), (older + 1) * RECORD_BYTES)
                self._free.append(older)
                del self.levels[key]
            self.levels[key] = level
            self._record_numbers[key] = number

    def level_of(self, key: bytes) -> Level | None:
        """The level that was stored last for the bucket `key`."""
        return self.levels.get(key)

    def put(self, key: bytes, level: Level) -> None:
        """Store the level of the bucket `key`, a result of `bucket_key`. Never raises."""
        number = self._record_numbers.get(key)
        if number is None:
            if not self._free:
                oldest, _ = self.levels.popitem(last=False)
                self._free.append(self._record_numbers.pop(oldest))
            number = self._record_numbers[key] = self._free.pop()
        self.levels[key] = level
        self.levels.move_to_end(key)
        record = _RECORD.pack(key, *level)
        try:
            self._points.write.hit()
            checked = record + _CHECK.pack(xxhash.xxh3_64_intdigest(record))
            write_all(self._fd, checked, (number + 1) * RECORD_BYTES)
        except OSError as error:
            self.errors.failed("write", self.path, error)
            return
        self._is_dirty = True
        self.errors.worked("write")


def bucket_key(kind: str, tenant: str) -> bytes:
    """Return the digest that identifies the bucket of `kind` (requests or tokens) of a tenant."""
    name = f"{kind}:{tenant}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=16, person=b"starling-quotas").digest()


def _parse(record: bytes) -> Level | None:
    if len(record) != RECORD_BYTES:
        return None
    body, (check,) = record[: _RECORD.size], _CHECK.unpack(record[_RECORD.size :])
    key, per_minute, level, at = _RECORD.unpack(body)
    if key == bytes(16) or xxhash.xxh3_64_intdigest(body) != check:
        return None
    if not (1 <= per_minute <= MAX_LEVEL and abs(level) <= MAX_LEVEL and 0 <= at <= MAX_AT):  # False for NaN
        return None
    return Level(per_minute, level, at)
