"""Drops cached pages while the server runs: those in the arena, in the spill file and in the state directory.

    arena   page by page: cached ones are freed, those that a sequence holds stay. Between a restart and the
            reconciliation (manager.py) it is not known which those are: then the others are freed after it
    find    the thread of each page file lists its pages; with an owner it reads their records
    remove  page by page, except for those that are in the arena: a sequence holds them, or came back for them

Each step does a bounded amount of work, so that frames do not wait. Nothing that runs changes its bytes: a page that is
dropped is only computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from shm.prefix_hash import PageHash
from stages.kv.model import ModelPages
from stages.kv.pool.page_headers import unpack_identity
from stages.kv.pool.page_table import CACHED, LEASED
from stages.kv.storage.threaded_store import ThreadedPageStore

STEP_PAGES = 1024  # looked at in one step: about 1 ms


class ClearedPages(msgspec.Struct):
    """What was dropped of one version of a model."""

    model: str
    arena: int = 0  # pages freed in memory
    disk: int = 0  # pages removed from page files
    in_use: int = 0  # pages that sequences hold
    later: int = 0  # pages in memory that are dropped after the reconciliation, but for those that sequences hold
    page_bytes: int = 0


class Clearing:
    """One `starling kv clear`. Call `step` until `is_done`."""

    def __init__(self, models: list[ModelPages], owner: str | None, owners: frozenset[str]) -> None:
        """`owner`: drop only what may be this tenant's, by its salt; None: everything. `owners`: all tenants' salts."""
        self.is_done = False
        self.reports: list[ClearedPages] = []
        self._waiting: list[ThreadedPageStore] = []  # whose threads are listing their pages
        self._found: deque[tuple[ThreadedPageStore, ModelPages, ClearedPages, list[PageHash]]] = deque()
        self._stores: list[ThreadedPageStore] = []
        self._work = self._run([pages for pages in models if pages.manager is not None], owner, owners)

    def step(self) -> bool:
        """Do a bounded amount of work. Returns whether there is more that waits for no thread."""
        if self.is_done:
            return False
        progressed = next(self._work, None)
        self.is_done = progressed is None
        return bool(progressed)

    def _run(self, models: list[ModelPages], owner: str | None, owners: frozenset[str]) -> Iterator[bool]:
        for pages in models:
            manager, geometry = pages.manager, pages.geometry
            if manager is None or geometry is None:
                continue
            others: frozenset[PageHash] = frozenset()
            if owner is not None:
                others = manager.owners.others(owner, manager.root_hash_of, owners)
            report = ClearedPages(pages.model.name, page_bytes=geometry.page_bytes)
            self.reports.append(report)
            yield from self._clear_arena(pages, others, report)
            for store in pages.stores():
                self._stores.append(store)
                while not (store.is_open or store.error or store.is_closing):
                    yield False  # what its thread finds in the file would come back
                self._find(store, pages, report, others)
        while self._waiting or self._found:
            # What the thread of a closed file finds is not reported: its version was unloaded.
            self._waiting = [store for store in self._waiting if not store.is_closing]
            if not self._found:
                yield False
                continue
            store, pages, report, hashes = self._found.popleft()
            for begin in range(0, len(hashes), STEP_PAGES):
                for page_hash in hashes[begin : begin + STEP_PAGES]:
                    manager = pages.manager
                    if manager is None or manager.pool.table.get_cached_page(page_hash) is None:
                        store.remove(page_hash)
                        report.disk += 1
                yield True
        while any(store.is_removing for store in self._stores):
            yield False
        self._stores.clear()  # a store leads to its arena, which would stay mapped when its version is unloaded

    def _clear_arena(self, pages: ModelPages, others: frozenset[PageHash], report: ClearedPages) -> Iterator[bool]:
        manager = pages.manager
        assert manager is not None
        table, headers = manager.pool.table, manager.pool.headers
        for page in range(table.total):
            if page and page % STEP_PAGES == 0:
                yield True
                if pages.manager is not manager:
                    return
            state, page_hash = table.state(page), table.hash_of(page)
            if page_hash is None or (others and headers.lease_of(page)[0] in others):
                continue
            if state == CACHED and not table.may_free:
                manager.pool.remove([page_hash])
                report.later += 1
            elif state == CACHED:
                table.evict(page)
                report.arena += 1
            elif state == LEASED:
                report.in_use += 1
        manager.pool.shrink()

    def _find(
        self, store: ThreadedPageStore, pages: ModelPages, report: ClearedPages, others: frozenset[PageHash]
    ) -> None:
        def on_found(hashes: list[PageHash]) -> None:
            self._waiting.remove(store)
            self._found.append((store, pages, report, hashes))

        self._waiting.append(store)
        if not store.list_pages(_not_of(others) if others else None, on_found):
            self._waiting.remove(store)


def _not_of(others: frozenset[PageHash]) -> Callable[[bytes], bool]:
    """Whether the page of a record may be dropped: also if the record is torn."""

    def wants(record: bytes) -> bool:
        identity = unpack_identity(record)
        return identity is None or identity.root not in others

    return wants
