"""Full pages on disk: a bounded file of slots, used for evicted pages and for saved ones.

    0       4096    magic "STARPAGE", layout u32, length u32 and XXH3-64 of the identity, the
                    identity (msgpack: model digest, geometry): who opens the file expects the same
    extent  4096    records: PAGE_RECORD bytes for each of at most 32 slots, as in the page header
            ...     the slots' pages, page_bytes each

The file grows by extents, each reserved with `posix_fallocate` before it is used, so that a full disk is
an error here and not a signal later.  A slot's record is zeroed before its page is written and written
after it: what a crash or a power cut leaves half-done has no record, or fails its checksum.

Reading is through a map, after the kernel has been asked to bring the range in: a bad sector or a
truncated file is then an error as well.  The checksum is taken of the copy in the arena, of the very
bytes that will be used.  Whatever fails costs a page, is counted and logged, and is never served.

The one writer is the kv stage (flock).  When all slots are taken, the longest unused one is.  Slots that
became free are holes; when there are two extents of them, `compact` moves the last extent's pages down and
gives its bytes back.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from pipeline.faults import points
from pipeline.files import write_all
from shm.pages import HEADER, PAGE_FULL, PAGE_RECORD
from stages.kv.pool.headers import PageName, checksum, unpack_name
from stages.kv.pool.prefix_hash import PageDigest

log = logging.getLogger("starling.kv")

MAGIC = b"STARPAGE"
LAYOUT = 1
BLOCK = 4096
SLOTS = BLOCK // PAGE_RECORD  # of an extent
PAUSE_S = 30.0  # after an error of the disk nothing is written for so long
SLOW_S = 0.1  # a page that takes longer to write or read
SLOW_FACTOR = 20  # is followed by a pause this many times as long
MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14

HEAD = struct.Struct("<8sIIQ")
_FIELDS = HEADER.fields
assert _FIELDS is not None
STATE_AT = int(_FIELDS["state"][1])
_LAST_USE_AT = int(_FIELDS["last_use"][1])


@dataclass
class StoreCounters:
    """Since the process started."""

    stored: int = 0
    fetched: int = 0
    replaced: int = 0  # given up for others
    damaged: int = 0  # dropped at open or on the way back: checksum, geometry, truncation
    errors: int = 0  # of the disk
    moved: int = 0  # pages, to close holes
    returned_bytes: int = 0  # to the file system, by compaction


class PageStore:
    """Slots for pages of `page_bytes`, a multiple of 4096; at most `max_bytes` of file. A `pool.Tier`."""

    def __init__(
        self,
        path: Path,
        identity: dict[str, Any],
        page_bytes: int,
        max_bytes: int,
        residency: int,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        name: str = "spill",
    ) -> None:
        """Open or create. Raises `OSError` when that cannot be, `BlockingIOError` when it is in use.

        `name` is that of its fault points: each write of a page, with their count, and `NAME_read`.
        """
        if page_bytes % BLOCK:
            raise ValueError(f"page_bytes is {page_bytes}, expected a multiple of {BLOCK}")
        self.path = path
        self.residency = residency
        self.page_bytes = page_bytes
        self.counters = StoreCounters()
        self._clock = clock
        self._wall_ns = wall_ns
        self._fault = points.fault_point("disk", name)
        self._read_fault = points.fault_point("disk", name + "_read")
        self._paused_until = self._full_until = self._unread_until = float("-inf")
        self._slots_each = max(0, min(SLOTS, (max_bytes - 2 * BLOCK) // page_bytes))
        self._extent_bytes = BLOCK + self._slots_each * page_bytes
        self._max_extents = max(0, max_bytes - BLOCK) // self._extent_bytes if self._slots_each else 0
        self._slot_of: OrderedDict[PageDigest, int] = OrderedDict()  # longest unused first
        self._used_ns: dict[PageDigest, int] = {}  # wall clock
        self._free: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._views: list[np.ndarray] = []
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open({**identity, "page_bytes": page_bytes, "slots": self._slots_each})
        except BaseException:
            os.close(self._fd)
            raise

    # -------------------------------------------------------------- what is there

    def __contains__(self, digest: PageDigest) -> bool:
        return digest in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def capacity(self) -> int:
        """Pages under the bound."""
        return self._max_extents * self._slots_each

    @property
    def file_bytes(self) -> int:
        return BLOCK + len(self._maps) * self._extent_bytes

    @property
    def hole_bytes(self) -> int:
        """Of the file's, those of slots without a page."""
        return len(self._free) * self.page_bytes

    def digests(self) -> list[PageDigest]:
        """Longest unused first."""
        return list(self._slot_of)

    def touch(self, digest: PageDigest) -> None:
        """Used again: it goes last."""
        self._slot_of.move_to_end(digest)
        self._used_ns[digest] = self._wall_ns()

    def idle(self, before_ns: int) -> list[PageDigest]:
        """Those not used since `before_ns` of the wall clock, longest unused first."""
        found = []
        for digest in self._slot_of:
            if self._used_ns[digest] >= before_ns:
                break
            found.append(digest)
        return found

    # -------------------------------------------------------------- to disk and back

    def put(self, digest: PageDigest, record: bytes, content: np.ndarray) -> bool:
        """Keep a copy. False: the disk is full, failing or slow, or the bound is zero."""
        if digest in self._slot_of:
            self.touch(digest)
            return True
        begun = self._clock()
        if begun < self._paused_until or self.capacity == 0:
            return False
        slot = -1
        try:
            slot = self._take_slot()
            if slot < 0:
                return False
            if self._fault.trigger is not None:
                self._fault.trigger(self.counters.stored + 1)
            self._write(self._record_at(slot), bytes(PAGE_RECORD))
            self._write(self._page_at(slot), content.data)
            self._write(self._record_at(slot), record)
        except OSError as error:
            if slot >= 0:
                self._free.append(slot)
            self._fail(error)
            return False
        self._slot_of[digest] = slot
        self._used_ns[digest] = self._wall_ns()
        self.counters.stored += 1
        took = self._clock() - begun
        if took > SLOW_S:
            self._paused_until = begun + took * SLOW_FACTOR
            log.warning("%s: a page took %.0f ms to write; pausing", self.path, took * 1000)
        return True

    def expect(self, digests: Iterable[PageDigest]) -> None:
        """These will be fetched: read them now, in the order of the file and neighbours in one go.

        Prefixes are evicted from their end, so one after the other they would be read backwards, at half the
        disk's speed.  What cannot be read here is found to be so when it is fetched.
        """
        slots = sorted(self._slot_of[digest] for digest in digests if digest in self._slot_of)
        for _, run in groupby(enumerate(slots), lambda item: (item[1] - item[0], item[1] // self._slots_each)):
            first, *rest = [slot for _, slot in run]
            with suppress(OSError):
                self._populate(first, 1 + len(rest))

    def fetch(self, digest: PageDigest, out: np.ndarray) -> PageName | None:
        """Copy a page into `out` (page_bytes,) u8. None: it is not there, was damaged, or the disk is too slow.

        `out` is void then.
        """
        slot = self._slot_of.get(digest)
        begun = self._clock()
        if slot is None or begun < self._unread_until:
            return None
        try:
            name = self._read(slot, digest, out)
        except (OSError, ValueError) as error:
            log.warning("%s: slot %d cannot be read: %s", self.path, slot, error)
            name = None
        if name is None:
            self.counters.damaged += 1
            log.warning("%s: the page in slot %d is damaged and was dropped", self.path, slot)
            self._drop(digest)
            return None
        self.touch(digest)
        self.counters.fetched += 1
        took = self._clock() - begun
        if took > SLOW_S:
            # Everybody waits for this one process: computing the others again is faster.
            self._unread_until = begun + min(took * SLOW_FACTOR, PAUSE_S)
            log.warning("%s: a page took %.0f ms to read; pausing", self.path, took * 1000)
        return name

    def discard(self, digest: PageDigest) -> None:
        """It is not wanted any more."""
        if digest in self._slot_of:
            self._drop(digest)

    def compact(self, limit: int) -> bool:
        """Move at most `limit` pages of the last extent into holes before it, and cut the file when it is empty.

        True: there is more to do.  With fewer than two extents of holes nothing is done, so that one that was
        given back is not asked for again at once.
        """
        if len(self._free) < 2 * self._slots_each or not self._maps or self._clock() < self._paused_until:
            return False
        first = (len(self._maps) - 1) * self._slots_each
        left = [(digest, slot) for digest, slot in self._slot_of.items() if slot >= first]
        try:
            for digest, slot in left[:limit]:
                self._move(digest, slot, first)
            if len(left) <= limit:
                self._shrink(first)
        except OSError as error:
            self._fail(error)
            return False
        return len(self._free) >= 2 * self._slots_each

    def close(self) -> None:
        """Idempotent. What was put stays."""
        if self._fd >= 0:
            self._views.clear()
            for map_ in self._maps:
                map_.close()
            self._maps.clear()
            os.close(self._fd)
            self._fd = -1

    # -------------------------------------------------------------- slots

    def _record_at(self, slot: int) -> int:
        extent, i = divmod(slot, self._slots_each)
        return BLOCK + extent * self._extent_bytes + i * PAGE_RECORD

    def _page_at(self, slot: int) -> int:
        extent, i = divmod(slot, self._slots_each)
        return BLOCK + extent * self._extent_bytes + BLOCK + i * self.page_bytes

    def _take_slot(self) -> int:
        may_grow = len(self._maps) < self._max_extents and self._clock() >= self._full_until
        if not self._free and may_grow:
            try:
                self._grow()
            except OSError as error:
                if not self._slot_of or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                # The disk is full: make do with the slots that there are.
                self._full_until = self._clock() + PAUSE_S
                self.counters.errors += 1
                log.warning("%s: no room to grow past %d bytes: %s", self.path, self.file_bytes, error)
        if self._free:
            return self._free.pop()
        if not self._slot_of:
            return -1
        digest, slot = self._slot_of.popitem(last=False)
        del self._used_ns[digest]
        self.counters.replaced += 1
        return slot

    def _grow(self) -> None:
        extent = len(self._maps)
        begin = BLOCK + extent * self._extent_bytes
        os.posix_fallocate(self._fd, begin, self._extent_bytes)
        self._write(begin, bytes(BLOCK))
        self._map(extent)
        self._free += range((extent + 1) * self._slots_each - 1, extent * self._slots_each - 1, -1)

    def _map(self, extent: int) -> None:
        begin = BLOCK + extent * self._extent_bytes
        map_ = mmap.mmap(self._fd, self._extent_bytes, access=mmap.ACCESS_READ, offset=begin)
        self._maps.append(map_)
        self._views.append(np.frombuffer(map_, np.uint8))

    def _move(self, digest: PageDigest, slot: int, below: int) -> None:
        """A page into a hole before slot `below`; its bytes are read with their checksum, or it is dropped."""
        page = np.empty(self.page_bytes, np.uint8)
        record = os.pread(self._fd, PAGE_RECORD, self._record_at(slot))
        if self._read(slot, digest, page) is None:
            self.counters.damaged += 1
            log.warning("%s: the page in slot %d is damaged and was dropped", self.path, slot)
            self._drop(digest)
            return
        hole = min(self._free)
        assert hole < below, "more pages than slots before them"
        self._write(self._record_at(hole), bytes(PAGE_RECORD))
        self._write(self._page_at(hole), page.data)
        self._write(self._record_at(hole), record)
        self._write(self._record_at(slot), bytes(PAGE_RECORD))
        self._free.remove(hole)
        self._free.append(slot)
        self._slot_of[digest] = hole
        self.counters.moved += 1

    def _shrink(self, first: int) -> None:
        """Give the last extent back; its slots, from `first` on, are free."""
        os.ftruncate(self._fd, self.file_bytes - self._extent_bytes)
        self._views.pop()
        self._maps.pop().close()
        self._free = sorted((slot for slot in self._free if slot < first), reverse=True)
        self.counters.returned_bytes += self._extent_bytes

    def _drop(self, digest: PageDigest) -> None:
        slot = self._slot_of.pop(digest)
        del self._used_ns[digest]
        self._free.append(slot)
        try:
            self._write(self._record_at(slot), bytes(PAGE_RECORD))
        except OSError as error:
            self._fail(error)

    # -------------------------------------------------------------- bytes

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        write_all(self._fd, data, offset)

    def _read(self, slot: int, digest: PageDigest, out: np.ndarray) -> PageName | None:
        if self._read_fault.trigger is not None:
            self._read_fault.trigger(self.counters.fetched + 1)
        record = os.pread(self._fd, PAGE_RECORD, self._record_at(slot))
        name = unpack_name(record) if len(record) == PAGE_RECORD else None
        if name is None or name.digest != digest:
            return None
        begin = self._populate(slot, 1)
        out[:] = self._views[slot // self._slots_each][begin : begin + self.page_bytes]
        return name if checksum(out) == name.checksum else None

    def _populate(self, slot: int, count: int) -> int:
        """Bring pages of one extent into memory; where in its map they begin. Raises `OSError`."""
        extent = slot // self._slots_each
        begin = self._page_at(slot) - (BLOCK + extent * self._extent_bytes)
        try:
            self._maps[extent].madvise(MADV_POPULATE_READ, begin, count * self.page_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14 cannot
                raise
        return begin

    def _fail(self, error: OSError) -> None:
        self.counters.errors += 1
        self._paused_until = self._clock() + PAUSE_S
        log.warning("%s: %s; no page is kept there for %.0f s", self.path, error, PAUSE_S)

    # -------------------------------------------------------------- opening

    def _open(self, identity: dict[str, Any]) -> None:
        packed = msgspec.msgpack.encode(identity, order="deterministic")
        head = HEAD.pack(MAGIC, LAYOUT, len(packed), xxhash.xxh3_64_intdigest(packed)) + packed
        found = os.pread(self._fd, BLOCK, 0)
        if found[: len(head)] != head:
            if found:
                log.warning("%s: of another model, geometry or layout; started afresh", self.path)
            os.ftruncate(self._fd, 0)
            self._write(0, head.ljust(BLOCK, b"\0"))
            return
        there = (os.fstat(self._fd).st_size - BLOCK) // self._extent_bytes if self._slots_each else 0
        extents = min(there, self._max_extents)
        os.ftruncate(self._fd, BLOCK + extents * self._extent_bytes)
        records: list[tuple[int, PageDigest, int]] = []
        for extent in range(extents):
            self._map(extent)
            table = os.pread(self._fd, BLOCK, BLOCK + extent * self._extent_bytes)
            for i in range(self._slots_each):
                slot = extent * self._slots_each + i
                record = table[i * PAGE_RECORD : (i + 1) * PAGE_RECORD]
                if int.from_bytes(record[STATE_AT : STATE_AT + 4], "little") == PAGE_FULL:
                    name = unpack_name(record)
                    if name is not None:
                        last_use = int.from_bytes(record[_LAST_USE_AT : _LAST_USE_AT + 8], "little")
                        records.append((last_use, name.digest, slot))
                        continue
                    self.counters.damaged += 1
                self._free.append(slot)
        self._free.reverse()
        for last_use, digest, slot in sorted(records):
            if digest in self._slot_of:
                self._free.append(slot)
            else:
                self._slot_of[digest] = slot
                self._used_ns[digest] = last_use
