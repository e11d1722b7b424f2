"""The kv stage's access to the page headers in the arena (layout and states: shm/pages.py).

The kv stage is the only writer of bytes 0..128 of a header.  Every method writes in an order that leaves either a
correct or a recognisably torn header if the process is killed between two stores.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from shm.pages import HEADER, IDENTITY, PAGE_FREE, PAGE_FULL, PAGE_HEADER, PAGE_LEASED, PAGE_RECORD
from shm.prefix_hash import PageHash

_FREE = PAGE_FREE.to_bytes(4, "little")
_LEASED = PAGE_LEASED.to_bytes(4, "little")
_FULL = PAGE_FULL.to_bytes(4, "little")
_STATE_AT, _CHECK_AT, _CHECK_END = 72, 64, 72
_HASH_AND_CHECKSUM = struct.Struct("<32x16sQ")
assert (IDENTITY.size, _CHECK_END) == (_CHECK_AT, _STATE_AT)


class PageCounts(NamedTuple):
    """Pages by state; their sum is the number of pages in the arena."""

    free: int
    cached: int
    leased: int


def count_states(states: np.ndarray, refs: np.ndarray) -> PageCounts:
    """Count the headers' fields, (n_pages,) u32 both. A page of an unknown state is in none of the counts."""
    full = states == PAGE_FULL
    return PageCounts(
        int(np.count_nonzero(states == PAGE_FREE)),
        int(np.count_nonzero(full & (refs == 0))),
        int(np.count_nonzero((states == PAGE_LEASED) | (full & (refs > 0)))),
    )


def checksum(content: np.ndarray) -> int:
    """XXH3-64 of a page's bytes, (page_bytes,) u8."""
    return xxhash.xxh3_64_intdigest(content.data)


class PageIdentity(NamedTuple):
    """The part of a full page's header that is constant while the page is full."""

    root: PageHash
    parent: PageHash
    page_hash: PageHash
    checksum: int  # XXH3-64 of the page's bytes
    ordinal: int  # index of the page in its prefix
    tokens: int

    def pack(self) -> bytes:
        """Return the first 72 bytes of a header: the identity and its check."""
        identity = IDENTITY.pack(*self)
        return identity + xxhash.xxh3_64_intdigest(identity).to_bytes(8, "little")


def unpack_identity(record: bytes) -> PageIdentity | None:
    """Return the identity in a header or a disk record; None when it is torn."""
    if xxhash.xxh3_64_intdigest(record[:_CHECK_AT]) != int.from_bytes(record[_CHECK_AT:_CHECK_END], "little"):
        return None
    return PageIdentity(*IDENTITY.unpack(record[:_CHECK_AT]))


MAX_USES = 0xFFFF_FFFF  # that a header counts


class PageHeaders:
    """Views over `headers` (n_pages, PAGE_HEADER) u8, contiguous."""

    def __init__(self, headers: np.ndarray) -> None:
        fields = headers.view(HEADER)[:, 0]
        self._fields = fields
        self._bytes = headers.data.cast("B")
        self._state: np.ndarray = fields["state"]
        self._root: np.ndarray = fields["root"]
        self._refs: np.ndarray = fields["refs"]
        self._last_use: np.ndarray = fields["last_use"]
        self._born: np.ndarray = fields["born"]
        self._uses: np.ndarray = fields["uses"]
        self._residency: np.ndarray = fields["residency"]
        self._serial: np.ndarray = fields["serial"]
        self._noted = np.zeros(len(fields), np.uint32)  # of `uses`, what the page's copies have in their records

    # -------------------------------------------------------------- writing

    def lease(self, pages: Sequence[int], root: PageHash, serial: int, now_ns: int, born_ns: int) -> None:
        """Lease new pages to a sequence; their previous contents are no longer valid."""
        rows = np.array(pages, np.intp)
        self._state[rows] = PAGE_FREE
        self._root[rows] = np.void(root)
        self._serial[rows] = serial
        self._born[rows] = born_ns
        self._last_use[rows] = now_ns
        self._uses[rows] = 1
        self._refs[rows] = 1
        self._residency[rows] = 0
        self._noted[rows] = 0
        self._state[rows] = PAGE_LEASED

    def mark_full(self, page: int, identity: PageIdentity) -> None:
        """The page's bytes are final: from now on it can be shared by its hash."""
        at = page * PAGE_HEADER
        self._bytes[at : at + _CHECK_END] = identity.pack()
        self._bytes[at + _STATE_AT : at + _STATE_AT + 4] = _FULL

    def free(self, page: int) -> None:
        """The page is free."""
        at = page * PAGE_HEADER + _STATE_AT
        self._bytes[at : at + 4] = _FREE

    def invalidate(self, page: int) -> None:
        """A full page is damaged while it may be leased: leased, without a hash, and with a serial of no lease."""
        self._serial[page] = 0
        at = page * PAGE_HEADER + _STATE_AT
        self._bytes[at : at + 4] = _LEASED

    def set_refs(self, pages: Sequence[int], refs: Sequence[int]) -> None:
        """Store the reference counts of `pages`."""
        self._refs[np.array(pages, np.intp)] = refs

    def set_all_refs(self, refs: Sequence[int]) -> None:
        """Store the reference counts of all pages."""
        self._refs[:] = refs

    def record_use(self, pages: Sequence[int], now_ns: int) -> None:
        """Count one more sequence that has held each of these pages."""
        rows = np.array(pages, np.intp)
        self._last_use[rows] = now_ns
        self._uses[rows] += 1

    def release(self, pages: Sequence[int], refs: Sequence[int], now_ns: int) -> None:
        """A sequence has released these pages; `refs` are the remaining reference counts."""
        rows = np.array(pages, np.intp)
        self._last_use[rows] = now_ns
        self._refs[rows] = refs

    def set_uses(self, page: int, uses: int) -> None:
        """A page was restored before a sequence holds it: its uses are those of its copy."""
        self._uses[page] = self._noted[page] = uses

    def mark_copy(self, page: int, where: int) -> None:
        """Add bits to `residency`."""
        self._residency[page] |= where

    def mark_saved(self, page: int, where: int) -> None:
        """As `mark_copy`, for a copy that was made now, with the record of now."""
        self.mark_copy(page, where)
        self._noted[page] = self._uses[page]

    def take_unnoted(self) -> list[tuple[int, int]]:
        """(page, uses) of all full pages with copies whose records lack uses. The caller adds them there."""
        has_new = (self._state == PAGE_FULL) & (self._residency != 0) & (self._uses > self._noted)
        pages = np.flatnonzero(has_new)
        counts = self._uses[pages] - self._noted[pages]
        self._noted[pages] = self._uses[pages]
        return list(zip(pages.tolist(), counts.tolist(), strict=True))

    def unmark_copy(self, page: int, where: int) -> None:
        """Remove bits from `residency`."""
        self._residency[page] &= ~np.asarray(where, self._residency.dtype)

    def clear_copies(self) -> None:
        """No page has a copy: after a restart, before the files are scanned."""
        self._residency[:] = 0

    # -------------------------------------------------------------- reading

    def without_copy(self, where: int, min_uses: int) -> list[int]:
        """Full pages that at least `min_uses` sequences have held and that have no copy at `where`."""
        is_missing = (self._state == PAGE_FULL) & (self._residency & where == 0) & (self._uses >= min_uses)
        return [int(page) for page in np.flatnonzero(is_missing)]

    def uses(self, page: int) -> int:
        """Sequences that have held the page."""
        return int(self._uses[page])

    def born_ns(self, page: int) -> int:
        """Admission of the sequence that computed the page, ns since 1970."""
        return int(self._born[page])

    def last_use_ns(self, page: int) -> int:
        """Last use of the page, ns since 1970."""
        return int(self._last_use[page])

    def lease_of(self, page: int) -> tuple[PageHash, int]:
        """(root hash, row serial) that the page was leased with."""
        return PageHash(self._root[page].tobytes()), int(self._serial[page])

    def state(self, page: int) -> int:
        """PAGE_FREE, PAGE_LEASED or PAGE_FULL."""
        return int(self._state[page])

    def count(self) -> PageCounts:
        """Count the pages by the headers alone."""
        return count_states(*self.states_and_refs())

    def states_and_refs(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of both fields, (n_pages,) u32."""
        return self._state.copy(), self._refs.copy()

    def snapshot(self) -> np.ndarray:
        """A copy of all headers, (n_pages,) HEADER."""
        return self._fields.copy()

    def identity(self, page: int) -> PageIdentity | None:
        """Identity of a full page; None when the header is torn."""
        return unpack_identity(self.record(page))

    def verify(self, page: int, page_hash: PageHash, content: memoryview) -> bool:
        """Check that the page has this hash and these bytes.

        Called for every page of a cache hit, so it checks only the hash and the checksum in the header: damage to
        either makes the check fail.  `identity` finds damage elsewhere in the header.
        """
        found, expected = _HASH_AND_CHECKSUM.unpack_from(self._bytes, page * PAGE_HEADER)
        return bool(found == page_hash and xxhash.xxh3_64_intdigest(content) == expected)

    def record(self, page: int) -> bytes:
        """The kv stage's part of the header, as it is written to disk with the page."""
        at = page * PAGE_HEADER
        return bytes(self._bytes[at : at + PAGE_RECORD])
