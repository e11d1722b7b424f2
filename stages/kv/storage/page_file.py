"""The layout of the file that full pages are saved in, and a reader for other processes (`starling kv`).

    0       4096    head: magic "STARPAGE", layout u32, length u32 and XXH3-64 u64 of the identity, the identity
                    (msgpack: model digest, geometry, page_bytes, slots), zeros
    extent  4096    records: PAGE_RECORD bytes for each of at most 32 cells, as in the page header
            ...     the pages of the cells, page_bytes each
    extent  ...

A *cell* is one record with its page; `slots` in the identity is the number of cells in an extent.

    record       page                meaning
    zeros        undefined           the cell is free, or its page is being written
    state full   checksum matches    the cell holds a page
    state full   checksum differs    damage: the page is dropped when it is read
    torn         undefined           damage: the cell is free after the next start

The writer (page_file_writer.py) zeroes the record, then writes the page, then the record.  Whatever a crash or a power
cut leaves half-done therefore has no record, or fails its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from shm.identity_block import BLOCK_BYTES, decode_identity, encode_identity
from shm.pages import HEADER, PAGE_FULL, PAGE_RECORD
from stages.kv.pool.page_headers import MAX_USES, PageIdentity, checksum, unpack_identity

BLOCK = BLOCK_BYTES
EXTENT_CELLS = BLOCK // PAGE_RECORD  # most cells of an extent

_MAGIC = b"STARPAGE"
_LAYOUT = 1
_READ_ATTEMPTS = 3  # for a page that looks damaged: its writer may be changing it
assert EXTENT_CELLS == 32
_FIELDS = HEADER.fields
assert _FIELDS is not None
_STATE_AT = int(_FIELDS["state"][1])
_LAST_USE_AT = int(_FIELDS["last_use"][1])
_USES_AT = int(_FIELDS["uses"][1])

# The fields of a record, which is the first part of a page header.
RECORD = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [field[0] for field in _FIELDS.values()],
        "offsets": [int(field[1]) for field in _FIELDS.values()],
        "itemsize": PAGE_RECORD,
    }
)


class CellLayout(NamedTuple):
    """Offsets in a file of extents. All values in bytes except cells and extents."""

    page_bytes: int
    extent_cells: int

    @property
    def extent_bytes(self) -> int:
        """Size of an extent."""
        return BLOCK + self.extent_cells * self.page_bytes

    def extent_at(self, extent: int) -> int:
        """Offset of an extent; of the one behind the last: the size of the file."""
        return BLOCK + extent * self.extent_bytes

    def record_at(self, cell: int) -> int:
        """Offset of a cell's record."""
        extent, i = divmod(cell, self.extent_cells)
        return self.extent_at(extent) + i * PAGE_RECORD

    def page_at(self, cell: int) -> int:
        """Offset of a cell's page."""
        extent, i = divmod(cell, self.extent_cells)
        return self.extent_at(extent) + BLOCK + i * self.page_bytes

    def n_extents(self, file_bytes: int) -> int:
        """Number of whole extents in a file."""
        return max(0, file_bytes - BLOCK) // self.extent_bytes if self.extent_cells else 0


def encode_head(identity: dict[str, Any]) -> bytes:
    """Return the first bytes of a file; zeros follow up to BLOCK."""
    return encode_identity(_MAGIC, _LAYOUT, identity)


def decode_head(head: bytes) -> dict[str, Any]:
    """Return the identity of a file. Raises `ValueError` with what is wrong."""
    return decode_identity(head, _MAGIC, _LAYOUT)


def is_in_use(record: bytes) -> bool:
    """Whether a cell with this record holds a page."""
    return int.from_bytes(record[_STATE_AT : _STATE_AT + 4], "little") == PAGE_FULL


def last_use_ns(record: bytes) -> int:
    """Last use of the page when it was saved, ns since 1970."""
    return int.from_bytes(record[_LAST_USE_AT : _LAST_USE_AT + 8], "little")


def n_uses(record: bytes) -> int:
    """Sequences that have held the page, as far as they are in its record."""
    return int.from_bytes(record[_USES_AT : _USES_AT + 4], "little")


def with_uses(record: bytes, count: int, last_use_ns: int) -> tuple[int, bytes]:
    """`count` more uses of a page: (offset in the record, new bytes there). The page's identity is not part of them."""
    changed = bytearray(record[_LAST_USE_AT : _USES_AT + 4])
    changed[:8] = max(last_use_ns, int.from_bytes(record[_LAST_USE_AT : _LAST_USE_AT + 8], "little")).to_bytes(
        8, "little"
    )
    changed[-4:] = min(n_uses(record) + count, MAX_USES).to_bytes(4, "little")
    return _LAST_USE_AT, bytes(changed)


class PageFile:
    """A file opened for reading. Raises `OSError`, or `ValueError` with what is wrong with the file as a whole."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.identity = decode_head(os.pread(self._fd, BLOCK, 0))
            self.page_bytes, cells = int(self.identity["page_bytes"]), int(self.identity["slots"])
            if self.page_bytes < BLOCK or self.page_bytes % BLOCK or not 0 <= cells <= EXTENT_CELLS:
                raise ValueError(f"its extents have {cells} pages of {self.page_bytes} bytes")
            self._layout = CellLayout(self.page_bytes, cells)
        except (KeyError, TypeError, OverflowError) as error:
            os.close(self._fd)
            raise ValueError(f"its identity lacks {error}") from None
        except BaseException:
            os.close(self._fd)
            raise
        self.file_bytes = os.fstat(self._fd).st_size
        self.n_cells = self._layout.n_extents(self.file_bytes) * self._layout.extent_cells

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _record(self, cell: int) -> bytes:
        return os.pread(self._fd, PAGE_RECORD, self._layout.record_at(cell))

    def records(self) -> Iterator[tuple[int, PageIdentity | None]]:
        """Yield (cell, identity) of every cell in use; None for a torn record."""
        for cell in range(self.n_cells):
            record = self._record(cell)
            if is_in_use(record):
                yield cell, unpack_identity(record)

    def is_intact(self, cell: int, identity: PageIdentity) -> bool:
        """Whether the bytes match the identity. True as well when the cell was given to another page meanwhile."""
        for _ in range(_READ_ATTEMPTS):
            content = np.frombuffer(os.pread(self._fd, self.page_bytes, self._layout.page_at(cell)), np.uint8)
            if checksum(content) == identity.checksum or unpack_identity(self._record(cell)) != identity:
                return True
        return False
