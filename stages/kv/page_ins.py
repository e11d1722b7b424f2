"""Grants that wait for pages from a disk: the pages are read on a thread while the stage serves others.

    acquire --(a page is on disk)--> waiting --(its pages are read, or WAIT_S have passed)--> granted

A grant that no longer waits shares the pages that were read by then, as far as they can be continued, and the rest is
computed: with windows (docs/kv-cache.md) all pages of a place must be there, and those of the window before it, of
which a shorter prefix has others.  If a page is late or damaged, the window of the longest prefix whose other pages
have been read is therefore read next, and the grant waits once more.

A waiting sequence has no lease yet: a release, a new request of the same sequence or another scheduler ends its wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pipeline.protocol import messages as m
from shm.prefix_hash import PageHash
from stages.kv.model import ModelPages
from stages.kv.storage.threaded_store import ThreadedPageStore

# At most, and with a window twice; computing a page takes about 100 times as long as reading it from a disk that works.
WAIT_S = 1.0

# Pages that are read from each page file.
_Reads = Sequence[tuple[ThreadedPageStore, list[PageHash]]]


@dataclass
class _Waiting:
    """An `Acquire` without an answer, and what it reads."""

    frame: m.Acquire
    until: float  # s of the clock
    reads: _Reads
    may_read_more: bool  # once

    @property
    def is_reading(self) -> bool:
        return any(store.is_reading(page_hash) for store, hashes in self.reads for page_hash in hashes)

    @property
    def is_complete(self) -> bool:
        return all(store.can_fetch(page_hash) for store, hashes in self.reads for page_hash in hashes)


@dataclass
class _Ahead:
    """A container of the pages that page files have read, or also of those that they will, but for `own`."""

    stores: Sequence[ThreadedPageStore]
    own: Set[PageHash]
    is_read: bool

    def __contains__(self, page_hash: Any) -> bool:
        if page_hash in self.own:
            return False
        return any(
            page_hash in store and (store.can_fetch(page_hash) if self.is_read else store.is_ahead(page_hash))
            for store in self.stores
        )


class PageIns:
    """The waiting grants of one version of a model."""

    def __init__(self, pages: ModelPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages = pages
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}  # by sequence

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, frame: m.Acquire) -> bool:
        """Read the pages that the sequence lacks. False: there are none, and the grant need not wait.

        Call `end` after the grant in either case.
        """
        self.end(frame.sequence)
        reads = [(store, store.read_ahead(hashes)) for store, hashes in self._choose(frame)]
        waiting = _Waiting(frame, self._clock() + WAIT_S, reads, bool(frame.window))
        self._waiting[frame.sequence] = waiting
        return waiting.is_reading

    def _reads_more(self, waiting: _Waiting, now: float) -> bool:
        """The grant waits once more, for a shorter prefix: see the top of this file."""
        manager, before = self._pages.manager, waiting.reads
        if not waiting.may_read_more or waiting.is_complete or manager is None:
            return False
        waiting.may_read_more = False
        if waiting.is_reading and not manager.groups.full:  # all that it waits for is a window, as any other end would
            return False
        read = {page_hash for store, hashes in before for page_hash in hashes if store.can_fetch(page_hash)}
        for store, hashes in before:
            store.release([page_hash for page_hash in hashes if page_hash not in read])
        chosen = self._choose(waiting.frame, read, manager.groups.full)
        kept = read.intersection(page_hash for _, hashes in chosen for page_hash in hashes)
        for store, hashes in before:
            store.release([page_hash for page_hash in hashes if page_hash in read - kept])
        waiting.reads = [(store, store.read_ahead(hashes)) for store, hashes in chosen]
        for store, hashes in before:
            store.release([page_hash for page_hash in hashes if page_hash in kept])
        waiting.until = now + WAIT_S
        return waiting.is_reading

    def _choose(self, frame: m.Acquire, own: Set[PageHash] = frozenset(), n_fetchable: int = 0) -> _Reads:
        """What is read: the pages of the longest prefix for which there is room beside what others read.

        `own`: pages that are read for it, and released if they are not chosen.  `n_fetchable`: of so many groups, the
        first ones, only pages that have been read.
        """
        manager, stores = self._pages.manager, [store for store in self._pages.stores() if len(store) or store.is_busy]
        if manager is None or not stores or not manager.is_reconciled or frame.sequence in manager.leases:
            return []
        known = self._pages.rows.known(frame.row, frame.n_tokens)
        if known is None:
            return []
        by_store: dict[int, list[PageHash]] = {}
        most = min(store.room_ahead for store in stores) + len(own)
        ahead = _Ahead(stores, own, n_fetchable > 0)
        hashes = manager.sharable_hashes(known[0], frame.salt, frame.sharable)
        for page_hash in manager.pages_outside(hashes, frame.window, most, ahead, n_fetchable):
            for i, store in enumerate(stores):
                if page_hash in store:
                    by_store.setdefault(i, []).append(page_hash)
                    break
        return [(stores[i], chosen) for i, chosen in by_store.items()]

    def end(self, sequence: str) -> None:
        """The sequence has its grant, or needs none any more. Ignores an unknown one."""
        waiting = self._waiting.pop(sequence, None)
        if waiting is not None:
            for store, hashes in waiting.reads:
                store.release(hashes)

    def clear(self) -> None:
        """Another scheduler attaches, or none."""
        for sequence in list(self._waiting):
            self.end(sequence)

    def due(self) -> list[m.Acquire]:
        """The requests to answer now. Call `end` after each answer."""
        if not self._waiting:
            return []
        now = self._clock()
        over = [one for one in self._waiting.values() if now >= one.until or not one.is_reading]
        return [one.frame for one in over if not self._reads_more(one, now)]

    @property
    def next_due(self) -> float:
        """When the first wait ends, s of the clock; infinity: there is none."""
        return min((one.until for one in self._waiting.values()), default=float("inf"))
