"""The cells of a page file for its one writer: reading, writing, growing and cutting. Layout: page_file.py."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from pipeline.files import write_all
from shm.pages import PAGE_RECORD
from shm.prefix_hash import PageHash
from stages.kv.pool.page_headers import PageIdentity, checksum, unpack_identity
from stages.kv.storage.page_file import BLOCK, RECORD, CellLayout, encode_head, is_in_use, last_use_ns, with_uses


class SavedPage(NamedTuple):
    """A cell that holds a page; sorts by the last use."""

    last_use_ns: int
    page_hash: PageHash
    cell: int


class FileContents(NamedTuple):
    """The cells of an existing file."""

    pages: list[SavedPage]  # longest unused first
    free: list[int]  # cells, torn ones included
    n_torn: int
    was_replaced: bool  # the file had another identity, and is empty now


class PageFileWriter:
    """All cells of a file that is open for writing. Does not know which pages are worth keeping.

    Extents are reserved with `posix_fallocate` before they are used: a full disk is an `OSError` then.  Pages are read
    into the caller's memory and never mapped: a bad sector is an `OSError` and no SIGBUS, and other threads run while
    the disk works.  All methods raise `OSError`.
    """

    def __init__(self, fd: int, layout: CellLayout) -> None:
        self.layout = layout
        self._fd = fd
        self.n_extents = 0  # in the file

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.layout.extent_at(self.n_extents)

    def open(self, identity: dict[str, Any], max_extents: int) -> FileContents:
        """Map the file, cut to `max_extents`; a file of another identity starts empty."""
        layout = self.layout
        head = encode_head(identity)
        existing = os.pread(self._fd, BLOCK, 0)
        if existing[: len(head)] != head:
            os.ftruncate(self._fd, 0)
            write_all(self._fd, head.ljust(BLOCK, b"\0"), 0)
            return FileContents([], [], 0, was_replaced=bool(existing))
        n_extents = min(layout.n_extents(os.fstat(self._fd).st_size), max_extents)
        os.ftruncate(self._fd, layout.extent_at(n_extents))
        pages: list[SavedPage] = []
        free: list[int] = []
        n_torn = 0
        for extent in range(n_extents):
            records = os.pread(self._fd, BLOCK, layout.extent_at(extent))
            for i in range(layout.extent_cells):
                cell = extent * layout.extent_cells + i
                record = records[i * PAGE_RECORD : (i + 1) * PAGE_RECORD]
                page = unpack_identity(record) if is_in_use(record) else None
                if page is None:
                    n_torn += is_in_use(record)
                    free.append(cell)
                else:
                    pages.append(SavedPage(last_use_ns(record), page.page_hash, cell))
        self.n_extents = n_extents
        return FileContents(sorted(pages), free, n_torn, was_replaced=False)

    # -------------------------------------------------------------- cells

    def write(self, cell: int, record: bytes, content: np.ndarray) -> None:
        """Write a page into a cell."""
        self.clear(cell)
        write_all(self._fd, content.data, self.layout.page_at(cell))
        write_all(self._fd, record, self.layout.record_at(cell))

    def clear(self, cell: int) -> None:
        """Mark a cell as free."""
        write_all(self._fd, bytes(PAGE_RECORD), self.layout.record_at(cell))

    def record(self, cell: int) -> bytes:
        """The record of a cell; shorter where the file was truncated."""
        return os.pread(self._fd, PAGE_RECORD, self.layout.record_at(cell))

    def records(self) -> np.ndarray:
        """The records of all cells, (n_cells,) RECORD; zeros where the file was truncated."""
        layout = self.layout
        size = layout.extent_cells * PAGE_RECORD
        blocks = (os.pread(self._fd, size, layout.extent_at(extent)) for extent in range(self.n_extents))
        return np.frombuffer(b"".join(block.ljust(size, b"\0") for block in blocks), RECORD)

    def add_uses(self, cell: int, count: int, last_use_ns: int) -> None:
        """Add uses to the record of a cell."""
        record = self.record(cell)
        if len(record) == PAGE_RECORD:
            at, changed = with_uses(record, count, last_use_ns)
            write_all(self._fd, changed, self.layout.record_at(cell) + at)

    def read(self, cell: int, page_hash: PageHash, out: np.ndarray) -> PageIdentity | None:
        """Copy a page into `out` (page_bytes,) u8 and verify the copy. None: damaged, and `out` is undefined."""
        record = self.record(cell)
        identity = unpack_identity(record) if len(record) == PAGE_RECORD else None
        if identity is None or identity.page_hash != page_hash:
            return None
        if os.preadv(self._fd, [out.data], self.layout.page_at(cell)) != self.layout.page_bytes:
            return None
        return identity if checksum(out) == identity.checksum else None

    def prefetch(self, cells: Iterable[int]) -> None:
        """Ask the kernel to read the pages of these cells in the order of the file, adjacent ones in one call.

        Prefixes are evicted from their end, so reading one page after the other would read the file backwards, at half
        the speed of the disk.  `read` reports errors.
        """
        layout = self.layout
        for _, run in groupby(
            enumerate(sorted(cells)), lambda item: (item[1] - item[0], item[1] // layout.extent_cells)
        ):
            run_cells = [cell for _, cell in run]
            begin, size = layout.page_at(run_cells[0]), len(run_cells) * layout.page_bytes
            with suppress(OSError):
                os.posix_fadvise(self._fd, begin, size, os.POSIX_FADV_WILLNEED)

    # -------------------------------------------------------------- extents

    def grow(self) -> list[int]:
        """Append an extent; returns its cells."""
        extent, layout = self.n_extents, self.layout
        os.posix_fallocate(self._fd, layout.extent_at(extent), layout.extent_bytes)
        write_all(self._fd, bytes(BLOCK), layout.extent_at(extent))
        self.n_extents += 1
        return list(range(extent * layout.extent_cells, (extent + 1) * layout.extent_cells))

    def shrink(self) -> None:
        """Cut the last extent off."""
        os.ftruncate(self._fd, self.file_bytes - self.layout.extent_bytes)
        self.n_extents -= 1
