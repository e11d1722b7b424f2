"""The pages of one request, read from an engine's arena while the engine goes on.

The engine names the last computed page of each sequence (stages/kv/page_exchange.py); each page's header names the page
before it.  A page that the engine frees and fills again meanwhile has another checksum, and ends the transfer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from shm.arena import HEADER_BYTES
from shm.pages import HEADER, PAGE_FULL, attach_kv, pages_offset, unpack_ordinal
from shm.prefix_hash import PageHash
from shm.sent_pages import HEAD_BYTES, IDENTITY_BYTES, MAX_PAGES, SentHead, read_identity, version_of

READ_BYTES = 4 << 20  # read together: some ms of a thread


class _Place(NamedTuple):
    at: int  # offset in the arena's file
    checksum: int


class FoundPages(NamedTuple):
    """Pages that can be read with `read`."""

    path: Path
    head: SentHead
    identities: bytes  # of all pages
    places: tuple[_Place, ...]
    n_known: int  # pages that were found; the run has the first ones

    def read(self) -> Iterator[bytes]:
        """Yield the whole run in parts. Raises `OSError`, or `ValueError` if a page is no longer there."""
        yield self.head.encode() + self.identities
        each = max(1, READ_BYTES // self.head.page_bytes)
        # Not mapped: reading memory that the engine has returned could end this process.
        with self.path.open("rb", buffering=0) as arena:
            for begin in range(0, len(self.places), each):
                yield b"".join(
                    _read(arena.fileno(), place, self.head.page_bytes) for place in self.places[begin : begin + each]
                )


def _read(fd: int, place: _Place, nbytes: int) -> bytes:
    page = os.pread(fd, nbytes, place.at)
    if xxhash.xxh3_64_intdigest(page) != place.checksum:
        raise ValueError("a page has changed since it was found")
    return page


def find_pages(path: Path, digest: str, tails: Sequence[str], max_bytes: int, lowest: Sequence[int] = ()) -> FoundPages:
    """The pages that end in `tails` (hashes, hex), those of a prefix in order, as many as `max_bytes` hold with a head.

    `digest`: of the model, hex.  `lowest`: for each tail the first place whose page is needed; empty: all are.
    Raises `OSError`, `ArenaError`, `ValueError`.
    """
    arena, views, geometry = attach_kv(path, bytes.fromhex(digest))
    try:
        headers, page_bytes = views.headers.copy(), geometry.page_bytes
        first = HEADER_BYTES + pages_offset(len(headers))
    finally:
        del views
        arena.close()
    fields = headers.view(HEADER)[:, 0]
    rows = np.flatnonzero(fields["state"] == PAGE_FULL)
    row_of = {fields["hash"][row].tobytes(): int(row) for row in rows}
    most = min(MAX_PAGES, max(0, max_bytes - HEAD_BYTES) // (page_bytes + IDENTITY_BYTES))
    seen: set[bytes] = set()
    identities: list[bytes] = []
    places: list[_Place] = []
    for tail, low in zip(tails, lowest or (0,) * len(tails), strict=True):
        chain: list[tuple[bytes, _Place]] = []
        name: bytes = bytes.fromhex(tail)
        while (row := row_of.get(name)) is not None and name not in seen:
            if unpack_ordinal(int(fields["ordinal"][row]))[0] < low:
                break
            seen.add(name)
            raw = headers[row, :IDENTITY_BYTES].tobytes()
            page = read_identity(raw)
            if page is None or page.page_hash != PageHash(name):
                break  # it is being written
            chain.append((raw, _Place(first + row * page_bytes, page.checksum)))
            name = page.parent
        for raw, place in chain[::-1][: most - len(places)]:
            identities.append(raw)
            places.append(place)
    if geometry.groups.n_groups > 1 and len(places) < len(seen):
        identities, places = [], []  # without its last pages of every layer group a run is of no use
    head = SentHead(version_of(digest, geometry), page_bytes, len(places))
    return FoundPages(path, head, b"".join(identities), tuple(places), len(seen))
