"""Caches pages that another engine of the same version has computed, for a sequence that is about to acquire its pages.

    begin    the pages that the sequence lacks are named, and those that it finds in the arena are held
    step     some of them are copied, at most so many bytes, so that frames do not wait longer
    end      after the grant, which shares them: nothing is held any more

Only pages are copied of which each one before is there: the first that is missing, damaged or has no room ends the
import.  Independent of sockets and files, as `manager.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Protocol

import numpy as np

from pipeline.protocol import messages as m
from shm.pages import pack_ordinal
from shm.prefix_hash import PageHash, group_hash
from stages.kv.manager import Manager
from stages.kv.pool.page_headers import PageIdentity


class SentPages(Container[PageHash], Protocol):
    """Full pages that another engine of the same version has computed."""

    @property
    def is_open(self) -> bool:
        """False: no page can be copied any more."""

    def copy(self, page_hash: PageHash, out: np.ndarray) -> int | None:
        """Copy a page into `out` (page_bytes,) u8; its checksum, verified. None: it is damaged, `out` undefined."""


class PageImport:
    """The pages of one sequence. Call `close` at the end."""

    def __init__(self, manager: Manager, frame: m.Acquire, tokens: np.ndarray, sent: SentPages) -> None:
        """`tokens` (n,) int32: of the frame's sequence.  Only pages whose hashes follow from them are read."""
        self.frame = frame
        self.sent = sent
        self.n_imported = self.n_damaged = 0
        self._manager = manager
        self._root = manager.root_hash_of(frame.salt)
        self._hashes = manager.sharable_hashes(tokens, frame.salt, frame.sharable)  # of each place
        manager.owners.learn(self._root, frame.salt)
        self._held = manager.imports[frame.sequence] = {}
        self._needed = manager.pages_with(self._hashes, frame.window, sent)
        for page_hash in self._needed:
            self._hold(page_hash)  # before an import makes room, which could evict it
        self._missing = deque(page_hash for page_hash in self._needed if page_hash not in self._held)
        self._place_of = {
            group_hash(page_hash, group): (place, group)
            for place, page_hash in enumerate(self._hashes if self._missing else ())
            for group in range(manager.groups.n_groups)
        }

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to copy."""
        return not self._missing

    def step(self, max_bytes: int) -> int:
        """Copy pages until there are `max_bytes` or more, or there is nothing to copy. Returns the bytes copied."""
        n_bytes = 0
        while self._missing and n_bytes < max_bytes:
            page_hash = self._missing.popleft()
            if self._hold(page_hash):
                continue
            if (self.frame.window or self._manager.groups.full) and page_hash not in self.sent:
                continue  # a source contains it
            if not self._import(page_hash):
                self._missing.clear()
            n_bytes += self._manager.pool.arena.pages.shape[1]
        return n_bytes

    def _hold(self, page_hash: PageHash) -> bool:
        """Hold the page of the arena, verified. False: there is none."""
        pool = self._manager.pool
        page = pool.table.get_cached_page(page_hash)
        if page is None:
            return False
        if pool.table.is_damaged(page):
            pool.counters.checksum_failures += 1
            pool.table.evict(page)
            return False
        pool.table.acquire_ref((page,))
        self._held[page_hash] = page
        return True

    def _import(self, page_hash: PageHash) -> bool:
        """Copy a page. False: it is missing or damaged, or there is no room."""
        pool, table = self._manager.pool, self._manager.pool.table
        if not self.sent.is_open or page_hash not in self.sent or not pool.make_room(1):
            return False
        now = pool.clock_ns()
        (page,) = table.get_new_pages(1, self._root, 0, now, now)
        content = self.sent.copy(page_hash, pool.arena.pages[page])
        if content is None:
            table.release_ref((page,), now)
            self.n_damaged += 1
            pool.counters.checksum_failures += 1
            return False
        place, group = self._place_of[page_hash]
        parent = group_hash(self._hashes[place - 1], group) if place else self._root
        ordinal, each = pack_ordinal(place, group), self._manager.page_tokens
        pool.cache_full_page(page, PageIdentity(self._root, parent, page_hash, content, ordinal, each))
        self._held[page_hash] = page
        self.n_imported += 1
        pool.counters.imported += 1
        pool.on_moved()
        return True

    def close(self) -> None:
        """Release what is held. Idempotent."""
        self._missing.clear()
        if self._manager.imports.get(self.frame.sequence) is self._held:
            del self._manager.imports[self.frame.sequence]
            pages = [self._held[page_hash] for page_hash in self._needed if page_hash in self._held]
            self._manager.pool.table.release_ref(pages, self._manager.pool.clock_ns())


class PageImports:
    """The imports of one version of a model, in the order in which they came."""

    def __init__(self) -> None:
        self._imports: dict[str, PageImport] = {}  # by sequence

    def __len__(self) -> int:
        return len(self._imports)

    @property
    def is_waiting(self) -> bool:
        """Whether there are pages to copy."""
        return any(not one.is_done for one in self._imports.values())

    def begin(self, manager: Manager, frame: m.Acquire, tokens: np.ndarray, sent: SentPages) -> bool:
        """Begin an import. False: there is nothing to copy, and the grant need not wait.

        Call `end` after the grant in either case.
        """
        self.end(frame.sequence)
        if not manager.is_reconciled or frame.sequence in manager.leases:
            return False
        made = self._imports[frame.sequence] = PageImport(manager, frame, tokens, sent)
        return not made.is_done

    def step(self, max_bytes: int) -> tuple[int, list[PageImport]]:
        """Copy at most about `max_bytes`. Returns the bytes copied and the imports that have come to their end."""
        n_bytes, done = 0, []
        for one in [one for one in self._imports.values() if not one.is_done]:
            if n_bytes >= max_bytes:
                break
            n_bytes += one.step(max_bytes - n_bytes)
            if one.is_done:
                done.append(one)
        return n_bytes, done

    def uses(self, sent: SentPages) -> bool:
        """Whether an import copies from there."""
        return any(one.sent is sent and not one.is_done for one in self._imports.values())

    def end(self, sequence: str) -> None:
        """The sequence has its grant, or needs none any more. Ignores an unknown one."""
        found = self._imports.pop(sequence, None)
        if found is not None:
            found.close()

    def clear(self) -> None:
        """Another scheduler attaches, or none."""
        for sequence in list(self._imports):
            self.end(sequence)
