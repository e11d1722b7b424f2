"""What tenants have used up, over the gateway's death and the whole server's: one small table on disk.

    0      64  magic "STRLQUO1", zeros
    64 n   64  records: key (16), per_minute i64, level f64, at f64 (s since 1970), zeros (16), XXH3-64 of the 56 before

A record is overwritten in place whenever its bucket is charged; it is with the kernel then, and outlives any
process; `unsynced` says when the disk should be asked for more.  A record that was torn or damaged is as if
it had never been: its tenant begins with a full bucket.  Names of tenants are not in it, only digests.
Bounded: `SLOTS` records, the one unused longest is given up.  Never fatal: without a disk quotas are kept in
memory, and one line of the log says so.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import xxhash

from pipeline.faults import points
from pipeline.files import DurableFile, write_all

log = logging.getLogger("starling.gateway.quotas")

MAGIC = b"STRLQUO1"
SLOTS = 4096
RECORD_BYTES = 64
_RECORD = struct.Struct("<16sqdd16x")
_CHECK = struct.Struct("<Q")
assert _RECORD.size + _CHECK.size == RECORD_BYTES


class Level(NamedTuple):
    """Of a bucket, when it was last charged."""

    per_minute: int
    level: float
    at: float  # s since 1970


class QuotaFile(DurableFile):
    """One file; its one writer is the gateway, which holds its stage's lock."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises `OSError` when there can be no file."""
        self.path = path
        self.levels: OrderedDict[bytes, Level] = OrderedDict()  # longest unused first
        self._slots: dict[bytes, int] = {}
        self._free: list[int] = []
        self._has_complained = False
        self._fault = points.fault_point("disk", "quotas")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._read()
        except OSError:
            self.close()
            raise

    def _read(self) -> None:
        raw = os.pread(self._fd, (SLOTS + 1) * RECORD_BYTES, 0)
        if raw[: len(MAGIC)] != MAGIC:
            if raw:
                log.warning("%s is no table of quotas and is begun anew", self.path)
            os.ftruncate(self._fd, 0)
            write_all(self._fd, MAGIC.ljust(RECORD_BYTES, b"\0"), 0)
            raw = b""
        found: list[tuple[bytes, Level, int]] = []
        for slot in range(SLOTS):
            record = raw[(slot + 1) * RECORD_BYTES : (slot + 2) * RECORD_BYTES]
            if (level := _parse(record)) is not None:
                found.append((record[:16], level, slot))
            else:
                self._free.append(slot)
        self._free.reverse()
        for key, level, slot in sorted(found, key=lambda one: one[1].at):
            self.levels[key] = level
            self._slots[key] = slot

    def put(self, key: bytes, level: Level) -> None:
        """`key` from `key_of`. Never raises."""
        slot = self._slots.get(key)
        if slot is None:
            if not self._free:
                oldest, _ = self.levels.popitem(last=False)
                self._free.append(self._slots.pop(oldest))
            slot = self._slots[key] = self._free.pop()
        self.levels[key] = level
        self.levels.move_to_end(key)
        record = _RECORD.pack(key, *level)
        try:
            if self._fault.trigger is not None:
                self._fault.trigger(0)
            checked = record + _CHECK.pack(xxhash.xxh3_64_intdigest(record))
            write_all(self._fd, checked, (slot + 1) * RECORD_BYTES)
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                log.error("%s: quotas would not outlive the gateway: %s", self.path, error.strerror)
            return
        self._is_dirty = True
        self._has_complained = False


def key_of(kind: str, tenant: str) -> bytes:
    """Of a bucket: what is counted, and whose it is."""
    name = f"{kind}:{tenant}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=16, person=b"starling-quotas").digest()


def _parse(record: bytes) -> Level | None:
    if len(record) != RECORD_BYTES:
        return None
    body, (check,) = record[: _RECORD.size], _CHECK.unpack(record[_RECORD.size :])
    key, per_minute, level, at = _RECORD.unpack(body)
    if key == bytes(16) or xxhash.xxh3_64_intdigest(body) != check or per_minute < 1:
        return None
    return Level(per_minute, level, at)
