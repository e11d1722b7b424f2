"""A bounded file of full pages, for evicted pages and for saved ones: a `PageStore`. Layout: page_file.py.

The kv stage is the only writer (flock).  When all cells are in use, the page unused longest is replaced.  Cells whose
pages were removed are holes: while there are two extents of them, `compact` moves the pages of the last extent into
holes before it and returns the extent to the file system.

A damaged page is dropped, counted and logged; it is recognised by its checksum, computed from the copy in the arena,
and never served.  After an error, or while the disk is slower than computing, the store pauses.  Time for which the
thread has no core is not the disk's.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import procfs
from pipeline.faults import points
from pipeline.files import make_directory, sync_directory
from shm.prefix_hash import PageHash
from stages.kv.pool.page_headers import MAX_USES, PageIdentity
from stages.kv.storage.page_file import BLOCK, EXTENT_CELLS, CellLayout, n_uses
from stages.kv.storage.page_file_writer import PageFileWriter
from stages.kv.storage.page_ranking import RankedPage, most_used

log = logging.getLogger("starling.kv")

PAUSE_S = 30.0  # without writing, after an error of the disk
SLOW_S = 0.1  # reading or writing a page for longer than this is slow
SLOW_FACTOR = 20  # a slow page is followed by a pause of this many times its duration


@dataclass
class StoreCounters:
    """Totals since the process started."""

    stored: int = 0
    fetched: int = 0
    replaced: int = 0  # pages dropped to make room for others
    damaged: int = 0  # pages dropped at open or when read: checksum, torn record, truncation
    errors: int = 0  # of the disk
    moved: int = 0  # pages, by compaction
    returned_bytes: int = 0  # to the file system, by compaction


class DiskPageStore:
    """Cells for pages of `page_bytes`, a multiple of 4096, in a file of at most `max_bytes`."""

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
        core_wait_s: Callable[[], float] | None = None,
    ) -> None:
        """Open or create. Raises `OSError`; `BlockingIOError` when another process writes to the file.

        `name`: of its fault points, `NAME` for each write of a page, with their number, and `NAME_read`.
        core_wait_s: time for which the thread could not run for want of a core, s; None: of the one that opens it.
        """
        if page_bytes % BLOCK:
            raise ValueError(f"page_bytes is {page_bytes}, expected a multiple of {BLOCK}")
        self.path = path
        self.residency = residency
        self.page_bytes = page_bytes
        self.counters = StoreCounters()
        self._clock = clock
        self._wall_ns = wall_ns
        self._points = points.DiskPoints(name)
        self._no_write_until = self._no_growth_until = self._no_read_until = float("-inf")
        layout = CellLayout(page_bytes, max(0, min(EXTENT_CELLS, (max_bytes - 2 * BLOCK) // page_bytes)))
        self._extent_cells = layout.extent_cells
        self._max_extents = layout.n_extents(max_bytes)
        self._cell_of: OrderedDict[PageHash, int] = OrderedDict()  # longest unused first
        self._last_use_ns: dict[PageHash, int] = {}  # ns since 1970
        self._lost: list[PageHash] = []  # pages that were replaced or damaged, until `take_lost`
        self._free: list[int] = []  # cells; the last one is used next
        self._points.open.hit()
        make_directory(path.parent)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._core_waits = procfs.CoreWaits()
        self._core_wait_s = core_wait_s or self._core_waits
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = PageFileWriter(self._fd, layout)
            with suppress(OSError):  # of use after a power failure only
                sync_directory(path.parent)
            self._open({**identity, "page_bytes": page_bytes, "slots": self._extent_cells})
        except BaseException:
            self._core_waits.close()
            os.close(self._fd)
            raise

    def _open(self, identity: dict[str, Any]) -> None:
        contents = self._file.open(identity, self._max_extents)
        if contents.was_replaced:
            log.warning(
                "a page file is of another model, geometry or layout: started empty", extra={"path": str(self.path)}
            )
        self.counters.damaged += contents.n_torn
        self._free = contents.free[::-1]
        for page in contents.pages:
            if page.page_hash in self._cell_of:  # a crash during `_move`: `remove` must leave no second copy
                self._clear_and_free(page.cell)
            else:
                self._cell_of[page.page_hash] = page.cell
                self._last_use_ns[page.page_hash] = page.last_use_ns

    def close(self) -> None:
        """Idempotent. Saved pages stay in the file."""
        self._core_waits.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):  # of a write that the kernel had accepted: its page fails its checksum
                os.close(fd)

    # -------------------------------------------------------------- contents

    def __contains__(self, page_hash: PageHash) -> bool:
        return page_hash in self._cell_of

    def __len__(self) -> int:
        return len(self._cell_of)

    @property
    def capacity(self) -> int:
        """Most pages under the bound."""
        return self._max_extents * self._extent_cells

    @property
    def room(self) -> int:
        """Pages that can be saved without another one being replaced."""
        may_grow = self._clock() >= self._no_growth_until
        n_more = (self._max_extents - self._file.n_extents) * self._extent_cells if may_grow else 0
        return len(self._free) + n_more

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self._file.file_bytes

    @property
    def hole_bytes(self) -> int:
        """Bytes of the file in cells without a page."""
        return len(self._free) * self.page_bytes

    @property
    def has_excess_holes(self) -> bool:
        """Whether `compact` can return an extent to the file system."""
        return self._file.n_extents > 0 and len(self._free) >= 2 * self._extent_cells

    @property
    def is_write_paused(self) -> bool:
        """Whether `save` refuses all pages, after an error or a slow write."""
        return self._clock() < self._no_write_until

    @property
    def is_read_paused(self) -> bool:
        """Whether `fetch` refuses all pages, after a slow read."""
        return self._clock() < self._no_read_until

    def hashes(self) -> list[PageHash]:
        """All pages, longest unused first."""
        return list(self._cell_of)

    def matching(self, wants: Callable[[bytes], bool] | None) -> list[PageHash]:
        """The pages whose records `wants` accepts (None: all). Reads every record; a record that fails is accepted."""
        if wants is None:
            return self.hashes()
        found = []
        for page_hash, cell in self._cell_of.items():
            try:
                if not wants(self._file.record(cell)):
                    continue
            except OSError as error:
                log.warning(
                    "the record of a page on disk cannot be read",
                    extra={"path": str(self.path), "cell": cell, "reason": str(error)},
                )
            found.append(page_hash)
        return found

    def touch(self, page_hash: PageHash) -> None:
        """Count a use: the page is replaced last."""
        self._cell_of.move_to_end(page_hash)
        self._last_use_ns[page_hash] = self._wall_ns()

    def add_uses(self, uses: Iterable[tuple[PageHash, int, int]]) -> None:
        """Count the uses (page, number, last one in ns since 1970) of pages that are there, in their records too.

        The longest unused ones come first.
        """
        there = [one for one in uses if one[0] in self._cell_of]
        for page_hash, _, _ in there:
            self.touch(page_hash)
        if self.is_write_paused:
            return
        try:
            for page_hash, count, last_use_ns in there:
                self._file.add_uses(self._cell_of[page_hash], count, last_use_ns)
        except OSError as error:
            self._pause_writing(error)

    def most_used(self, limit: int, is_present: Callable[[PageHash], bool]) -> list[RankedPage]:
        """At most `limit` pages worth warming. Reads every record."""
        try:
            return most_used(self._file.records(), limit, self._wall_ns(), is_present)
        except OSError as error:
            log.warning("records of a page file cannot be read", extra={"path": str(self.path), "reason": str(error)})
            return []

    def idle(self, before_ns: int) -> list[PageHash]:
        """Pages whose last use was before `before_ns` (ns since 1970), longest unused first."""
        found = []
        for page_hash in list(self._cell_of):  # a copy: the loop may call this while the thread changes it
            if self._last_use_ns.get(page_hash, before_ns) >= before_ns:
                break
            found.append(page_hash)
        return found

    # -------------------------------------------------------------- saving and fetching

    def save(self, page_hash: PageHash, record: bytes, content: np.ndarray) -> bool:
        """Keep a copy. False: the disk is full, failing or slow, or the bound is zero."""
        if page_hash in self._cell_of:
            self.touch(page_hash)
            return True
        if self.is_write_paused or self.capacity == 0:
            return False
        waited_s, begin = self._core_wait_s(), self._clock()
        cell = -1
        try:
            cell = self._take_cell()
            if cell < 0:
                return False
            if self._points.write.trigger is not None:
                self._points.write.trigger(self.counters.stored + 1)
            self._file.write(cell, record, content)
        except OSError as error:
            if cell >= 0:
                self._free.append(cell)
            self._pause_writing(error)
            return False
        self._cell_of[page_hash] = cell
        self._last_use_ns[page_hash] = self._wall_ns()
        self.counters.stored += 1
        duration = self._disk_s(begin, waited_s)
        if duration > SLOW_S:
            self._no_write_until = begin + duration * SLOW_FACTOR
            log.warning(
                "a page took long to write; pausing",
                extra={"path": str(self.path), "duration_ms": round(duration * 1000, 1)},
            )
        return True

    def prefetch(self, hashes: Iterable[PageHash]) -> None:
        """Read pages into memory that `fetch` will be called for."""
        cell_of = self._cell_of
        self._file.prefetch([cell_of[page_hash] for page_hash in hashes if page_hash in cell_of])

    def fetch(self, page_hash: PageHash, out: np.ndarray, is_use: bool = True) -> PageIdentity | None:
        """Copy a page into `out` (page_bytes,) u8. None, with `out` undefined: missing, damaged, or a slow disk.

        `is_use`: a sequence needs it.
        """
        cell = self._cell_of.get(page_hash)
        if cell is None or self.is_read_paused:
            return None
        waited_s, begin = self._core_wait_s(), self._clock()
        identity = self._read(cell, page_hash, out)
        if identity is None:
            self._drop_damaged(page_hash, cell)
            return None
        if is_use:
            self.touch(page_hash)
        self.counters.fetched += 1
        duration = self._disk_s(begin, waited_s)
        if duration > SLOW_S:
            # The requests that share this prefix wait meanwhile: computing the other pages again is faster.
            self._no_read_until = begin + min(duration * SLOW_FACTOR, PAUSE_S)
            log.warning(
                "a page took long to read; pausing",
                extra={"path": str(self.path), "duration_ms": round(duration * 1000, 1)},
            )
        return identity

    def _disk_s(self, begin: float, waited_s: float) -> float:
        """How long the disk has taken since `begin`, before which the thread had waited for a core for `waited_s`."""
        duration = self._clock() - begin
        return duration if duration <= SLOW_S else duration - (self._core_wait_s() - waited_s)

    def can_fetch(self, page_hash: PageHash) -> bool:
        """Whether `fetch` gives this page, unless it is damaged."""
        return page_hash in self._cell_of and not self.is_read_paused

    def remove(self, page_hash: PageHash, most_uses: int = MAX_USES) -> None:
        """Remove a page, if it is there and no more sequences have held it."""
        cell = self._cell_of.get(page_hash)
        if cell is None:
            return
        if most_uses < MAX_USES:
            try:
                if n_uses(self._file.record(cell)) > most_uses:
                    return
            except OSError as error:  # it is of no use then
                log.warning(
                    "the record of a page on disk cannot be read",
                    extra={"path": str(self.path), "cell": cell, "reason": str(error)},
                )
        self._drop(page_hash)

    def _read(self, cell: int, page_hash: PageHash, out: np.ndarray) -> PageIdentity | None:
        """Copy a page into `out`. None, with `out` undefined: it is damaged, or the disk cannot read it."""
        try:
            if self._points.read.trigger is not None:
                self._points.read.trigger(self.counters.fetched + 1)
            return self._file.read(cell, page_hash, out)
        except (OSError, ValueError) as error:
            log.warning(
                "a page on disk cannot be read", extra={"path": str(self.path), "cell": cell, "reason": str(error)}
            )
            return None

    def take_lost(self) -> list[PageHash]:
        """The pages that were replaced or found damaged since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _drop_damaged(self, page_hash: PageHash, cell: int) -> None:
        self.counters.damaged += 1
        self._lost.append(page_hash)
        log.warning("a page on disk is damaged and was dropped", extra={"path": str(self.path), "cell": cell})
        self._drop(page_hash)

    def _drop(self, page_hash: PageHash) -> None:
        cell = self._cell_of.pop(page_hash)
        del self._last_use_ns[page_hash]
        self._clear_and_free(cell)

    def _clear_and_free(self, cell: int) -> None:
        self._free.append(cell)
        try:
            self._file.clear(cell)
        except OSError as error:
            self._pause_writing(error)

    def _take_cell(self) -> int:
        """A cell for a new page: a free one, one of a new extent, or the one unused longest; -1: there is none."""
        may_grow = self._file.n_extents < self._max_extents and self._clock() >= self._no_growth_until
        if not self._free and may_grow:
            try:
                self._free += self._file.grow()[::-1]
            except OSError as error:
                if not self._cell_of or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                # The disk is full: replace pages instead.
                self._no_growth_until = self._clock() + PAUSE_S
                self.counters.errors += 1
                log.warning(
                    "no room for a page file to grow",
                    extra={"path": str(self.path), "bytes": self.file_bytes, "reason": str(error)},
                )
        if self._free:
            return self._free.pop()
        if not self._cell_of:
            return -1
        page_hash, cell = self._cell_of.popitem(last=False)
        del self._last_use_ns[page_hash]
        self.counters.replaced += 1
        self._lost.append(page_hash)
        return cell

    def _pause_writing(self, error: OSError) -> None:
        self.counters.errors += 1
        self._no_write_until = self._clock() + PAUSE_S
        log.warning(
            "a page file cannot be written: no page is saved there for a while",
            extra={"path": str(self.path), "reason": str(error), "pause_s": PAUSE_S},
        )

    # -------------------------------------------------------------- compaction

    def compact(self, limit: int) -> bool:
        """Move at most `limit` pages of the last extent into holes before it; cut the extent off once it is empty.

        Returns whether more remains.  With fewer than two extents of holes there is nothing to do, so that an extent
        that was cut off is not needed again at once.
        """
        file, each = self._file, self._extent_cells
        if not self.has_excess_holes or self.is_write_paused:
            return False
        first = (file.n_extents - 1) * each
        remaining = [(page_hash, cell) for page_hash, cell in self._cell_of.items() if cell >= first]
        try:
            for page_hash, cell in remaining[:limit]:
                self._move(page_hash, cell, first)
            if len(remaining) <= limit:
                file.shrink()
                self._free = sorted((cell for cell in self._free if cell < first), reverse=True)
                self.counters.returned_bytes += file.layout.extent_bytes
        except OSError as error:
            self._pause_writing(error)
            return False
        return self.has_excess_holes

    def _move(self, page_hash: PageHash, cell: int, first: int) -> None:
        """Move a page into a hole before cell `first`, or drop it if it is damaged or cannot be read."""
        page = np.empty(self.page_bytes, np.uint8)
        if self._read(cell, page_hash, page) is None:
            self._drop_damaged(page_hash, cell)
            return
        record = self._file.record(cell)
        hole = min(self._free)
        assert hole < first, "more pages than cells before the last extent"
        self._file.write(hole, record, page)
        self._file.clear(cell)
        self._free.remove(hole)
        self._free.append(cell)
        self._cell_of[page_hash] = hole
        self.counters.moved += 1
