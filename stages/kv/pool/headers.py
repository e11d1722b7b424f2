"""The `kv` stage's side of the page headers (layout and states: shm/pages.py).

The only writer of bytes 0..128 of a header.  Every method leaves the arena so that a successor reads
the truth or recognises a torn header, whenever the process dies; `read` is the successor's view.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from shm.pages import HEADER, IDENTITY, PAGE_FREE, PAGE_FULL, PAGE_HEADER, PAGE_LEASED, PAGE_RECORD
from stages.kv.pool.prefix_hash import PageDigest

_FREE = PAGE_FREE.to_bytes(4, "little")
_LEASED = PAGE_LEASED.to_bytes(4, "little")
_FULL = PAGE_FULL.to_bytes(4, "little")
_STATE_AT, _CHECK_AT, _CHECK_END = 72, 64, 72
_VOUCHER = struct.Struct("<32x16sQ")  # digest and checksum of a header


class Count(NamedTuple):
    """Pages by state; together they are all there are."""

    free: int
    cached: int
    leased: int


def count(states: np.ndarray, refs: np.ndarray) -> Count:
    """Of the headers' fields, (n_pages,) u32 both. A page of no known state is in none of the counts."""
    full = states == PAGE_FULL
    return Count(
        int(np.count_nonzero(states == PAGE_FREE)),
        int(np.count_nonzero(full & (refs == 0))),
        int(np.count_nonzero((states == PAGE_LEASED) | (full & (refs > 0)))),
    )


def checksum(content: np.ndarray) -> int:
    """XXH3-64 of a page's bytes, (page_bytes,) u8."""
    return xxhash.xxh3_64_intdigest(content.data)


class PageName(NamedTuple):
    """What a full page is: the part of its header that never changes while it is full."""

    root: PageDigest
    parent: PageDigest
    digest: PageDigest
    checksum: int
    ordinal: int
    tokens: int

    def pack(self) -> bytes:
        """The first 72 bytes of a header: identity and its check."""
        identity = IDENTITY.pack(*self)
        return identity + xxhash.xxh3_64_intdigest(identity).to_bytes(8, "little")


def unpack_name(record: bytes) -> PageName | None:
    """The name in a header or a disk record; None when it is torn."""
    if xxhash.xxh3_64_intdigest(record[:_CHECK_AT]) != int.from_bytes(record[_CHECK_AT:_CHECK_END], "little"):
        return None
    return PageName(*IDENTITY.unpack(record[:_CHECK_AT]))


class Headers:
    """Views over `headers` (n_pages, PAGE_HEADER) u8, contiguous."""

    def __init__(self, headers: np.ndarray) -> None:
        fields = headers.view(HEADER)[:, 0]
        self._bytes = headers.data.cast("B")
        self._state: np.ndarray = fields["state"]
        self._root: np.ndarray = fields["root"]
        self._refs: np.ndarray = fields["refs"]
        self._last_use: np.ndarray = fields["last_use"]
        self._born: np.ndarray = fields["born"]
        self._uses: np.ndarray = fields["uses"]
        self._residency: np.ndarray = fields["residency"]
        self._serial: np.ndarray = fields["serial"]

    def lease(self, pages: Sequence[int], root: PageDigest, serial: int, now_ns: int, born_ns: int) -> None:
        """Fresh pages for a sequence: whatever they held is no longer said to be there."""
        rows = np.array(pages, np.intp)
        self._state[rows] = PAGE_FREE
        self._root[rows] = np.void(root)
        self._serial[rows] = serial
        self._born[rows] = born_ns
        self._last_use[rows] = now_ns
        self._uses[rows] = 1
        self._refs[rows] = 1
        self._residency[rows] = 0
        self._state[rows] = PAGE_LEASED

    def publish(self, page: int, name: PageName) -> None:
        """The page is full and its bytes are final: only now may anybody find it."""
        at = page * PAGE_HEADER
        self._bytes[at : at + _CHECK_END] = name.pack()
        self._bytes[at + _STATE_AT : at + _STATE_AT + 4] = _FULL

    def free(self, page: int) -> None:
        at = page * PAGE_HEADER + _STATE_AT
        self._bytes[at : at + 4] = _FREE

    def demote(self, page: int) -> None:
        """A full page is in use, is damaged, and must not be found any more: serial 0 is nobody's."""
        self._serial[page] = 0
        at = page * PAGE_HEADER + _STATE_AT
        self._bytes[at : at + 4] = _LEASED

    def share(self, pages: Sequence[int], refs: Sequence[int], now_ns: int) -> None:
        """A further sequence holds these pages, `refs` do now."""
        rows = np.array(pages, np.intp)
        self._last_use[rows] = now_ns
        self._uses[rows] += 1
        self._refs[rows] = refs

    def unpin(self, pages: Sequence[int], refs: Sequence[int], now_ns: int) -> None:
        """A sequence has let go of these pages, `refs` hold them still."""
        rows = np.array(pages, np.intp)
        self._last_use[rows] = now_ns
        self._refs[rows] = refs

    def forget_copies(self) -> None:
        """After a restart, before the copies that there are have been found again."""
        self._residency[:] = 0

    def without_copy(self, where: int, min_uses: int) -> list[int]:
        """Full pages that at least `min_uses` sequences have held and that have no copy there."""
        lacks = (self._state == PAGE_FULL) & (self._residency & where == 0) & (self._uses >= min_uses)
        return [int(page) for page in np.flatnonzero(lacks)]

    def mark_copy(self, page: int, where: int) -> None:
        """`where`: bits of `residency`."""
        self._residency[page] |= where

    def uses(self, page: int) -> int:
        return int(self._uses[page])

    def born_ns(self, page: int) -> int:
        return int(self._born[page])

    def last_use_ns(self, page: int) -> int:
        return int(self._last_use[page])

    def lease_of(self, page: int) -> tuple[PageDigest, int]:
        """(root, row serial) with which the page was leased."""
        return PageDigest(self._root[page].tobytes()), int(self._serial[page])

    def state(self, page: int) -> int:
        return int(self._state[page])

    def count(self) -> Count:
        """As the headers alone say it."""
        return count(*self.states_and_refs())

    def correct(self, refs: Sequence[int]) -> None:
        """After a restart: how many hold each page, now that it is known."""
        self._refs[:] = refs

    def states_and_refs(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of both fields, (n_pages,) u32."""
        return self._state.copy(), self._refs.copy()

    def name(self, page: int) -> PageName | None:
        """Of a full page; None when the header is torn."""
        return unpack_name(self.record(page))

    def vouches(self, page: int, digest: PageDigest, content: memoryview) -> bool:
        """Is the page of that name, and are these the bytes that the name was given for?

        Asked of every page of a hit.  Name and checksum speak for themselves here: whichever of them is damaged
        does not fit any more.  Damage elsewhere in the header is found by whoever reads what is there (`name`).
        """
        name, expected = _VOUCHER.unpack_from(self._bytes, page * PAGE_HEADER)
        return bool(name == digest and xxhash.xxh3_64_intdigest(content) == expected)

    def record(self, page: int) -> bytes:
        """The kv stage's part of the header, as it is written to disk with the page."""
        at = page * PAGE_HEADER
        return bytes(self._bytes[at : at + PAGE_RECORD])
