"""Grants that wait for pages from a disk: the pages are read on a thread while the stage serves others.

    acquire --(a page is on disk)--> waiting --(its pages are read, or WAIT_S have passed)--> granted

A grant that no longer waits shares the pages that were read by then, as far as they can be continued, and the rest is
computed: with windows (docs/kv-cache.md) all pages of a place must be there, and those of the window before it.  A
waiting sequence has no lease yet: a release, a new request of the same sequence or another scheduler ends its wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.protocol import messages as m
from shm.prefix_hash import PageHash
from stages.kv.model import ModelPages
from stages.kv.storage.threaded_store import ThreadedPageStore

WAIT_S = 1.0  # at most; computing a page takes about 100 times as long as reading it from a disk that works


@dataclass
class _Waiting:
    """An `Acquire` without an answer, and what it reads."""

    frame: m.Acquire
    until: float  # s of the clock
    reads: list[tuple[ThreadedPageStore, list[PageHash]]]

    @property
    def is_reading(self) -> bool:
        return any(store.is_reading(page_hash) for store, hashes in self.reads for page_hash in hashes)


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
        waiting = _Waiting(frame, self._clock() + WAIT_S, self._read_ahead(frame))
        self._waiting[frame.sequence] = waiting
        return waiting.is_reading

    def _read_ahead(self, frame: m.Acquire) -> list[tuple[ThreadedPageStore, list[PageHash]]]:
        manager, stores = self._pages.manager, [store for store in self._pages.stores() if len(store) or store.is_busy]
        if manager is None or not stores or not manager.is_reconciled or frame.sequence in manager.leases:
            return []
        known = self._pages.rows.known(frame.row, frame.n_tokens)
        if known is None:
            return []
        by_store: dict[int, list[PageHash]] = {}
        most = min(store.most_staged for store in stores)
        for page_hash in manager.pages_outside(known[0], frame.salt, frame.sharable, frame.window, most):
            for i, store in enumerate(stores):
                if page_hash in store:
                    by_store.setdefault(i, []).append(page_hash)
                    break
        return [(stores[i], stores[i].read_ahead(hashes)) for i, hashes in by_store.items()]

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
        return [one.frame for one in self._waiting.values() if now >= one.until or not one.is_reading]

    @property
    def next_due(self) -> float:
        """When the first wait ends, s of the clock; infinity: there is none."""
        return min((one.until for one in self._waiting.values()), default=float("inf"))
