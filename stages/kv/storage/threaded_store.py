"""A page file that one thread opens, reads and writes, so that a slow disk does not delay the stage: a `PageStore`.

    opening       contains nothing; `poll` reports the end of it
    save          copies the page and queues it; refused while more than `QUEUED_BYTES` wait: pages are only a cache
    read_ahead    queues a read; `fetch` copies the page once the thread has it
    release       the pages read ahead are not needed any more

All methods are called by the stage's loop; only `_run` runs on the thread, and it alone uses the `DiskPageStore` for
more than look-ups.  The jobs run in the order in which they were queued, so a page is read as it was last written.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from shm.prefix_hash import PageHash
from stages.kv.pool.page_headers import MAX_USES, PageIdentity, checksum, unpack_identity
from stages.kv.storage.disk_store import DiskPageStore, StoreCounters
from stages.kv.storage.page_file import n_uses
from stages.kv.storage.page_ranking import RankedPage

log = logging.getLogger("starling.kv")

QUEUED_BYTES = 64 << 20  # of pages that wait to be written
STAGED_BYTES = 256 << 20  # of pages that were read ahead, or are about to be
MAX_JOBS = 4096  # of all kinds

OnRanked = Callable[[list[RankedPage]], object]

_NO_HASH = PageHash(b"")
_file_locks: dict[Path, threading.Lock] = {}  # held by the thread of each file that is open in this process


class _Result(NamedTuple):
    """A finished job."""

    kind: Literal["read", "skip", "write", "remove", "lost", "list", "rank"]
    page_hash: PageHash
    is_written: bool = False
    identity: PageIdentity | None = None  # of a page that was read; None: it is missing or damaged
    content: np.ndarray | None = None  # (page_bytes,) u8, that was read or written
    hashes: list[PageHash] | None = None  # of a list, or lost
    on_listed: Callable[[list[PageHash]], object] | None = None
    ranked: list[RankedPage] | None = None
    on_ranked: Callable[[list[RankedPage]], object] | None = None


class ThreadedPageStore:
    """Owns `store`. `wake` ends the wait of the loop; it is called by the thread."""

    def __init__(
        self,
        path: Path,
        residency: int,
        open_store: Callable[[], DiskPageStore],
        wake: Callable[[], object] = lambda: None,
        on_lost: Callable[[PageHash], object] = lambda _: None,
    ) -> None:
        """`open_store` opens the file at `path`; the thread calls it when an earlier user of the file has closed it.

        `on_lost`: called by `poll` for each page that `save` accepted and the disk did not, and for each one that was
        replaced or found damaged.
        """
        self.path = path
        self.residency = residency  # its bit in the page header
        self.error: Exception | None = None  # why the file cannot be used
        self._open_store = open_store
        self._opened: DiskPageStore | None = None
        self._has_tried = threading.Event()  # the file is open, or cannot be opened
        self._wake = wake
        self._on_lost = on_lost
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: deque[_Result] = deque()
        self._unwritten: dict[PageHash, tuple[bytes, np.ndarray]] = {}  # queued: record and page
        self._n_queued = 0  # pages in queued jobs, those included that were removed meanwhile
        self._removed: Counter[PageHash] = Counter()  # removals that are queued
        self._touched: dict[PageHash, None] = {}  # uses that the thread has yet to count
        self._touched_lock = threading.Lock()
        self._reading: set[PageHash] = set()  # queued reads
        self._staged: dict[PageHash, tuple[PageIdentity, np.ndarray]] = {}
        self._wanted: Counter[PageHash] = Counter()  # calls of `read_ahead` without their `release`
        self._is_compacting = self._has_more_holes = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"pages-{path.name}", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- contents

    @property
    def is_open(self) -> bool:
        """Whether the file has been opened."""
        return self._opened is not None

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called: what is under way is not reported any more."""
        return self._is_closing

    def wait_opened(self, timeout_s: float) -> None:
        """Wait until the file is open or cannot be opened, at most `timeout_s`."""
        self._has_tried.wait(timeout_s)

    @property
    def _store(self) -> DiskPageStore:
        assert self._opened is not None, "the file is not open"
        return self._opened

    @property
    def counters(self) -> StoreCounters:
        """Totals since the file was opened."""
        return self._store.counters if self.is_open else StoreCounters()

    @property
    def capacity(self) -> int:
        """Most pages under the bound; 0 before the file is open."""
        return self._store.capacity if self.is_open else 0

    @property
    def room(self) -> int:
        """Pages that can be saved without another one being replaced; 0 before the file is open."""
        return max(0, self._store.room - self._n_queued) if self.is_open else 0

    @property
    def file_bytes(self) -> int:
        """Size of the file; 0 before it is open."""
        return self._store.file_bytes if self.is_open else 0

    @property
    def hole_bytes(self) -> int:
        """Bytes of the file in cells without a page."""
        return self._store.hole_bytes if self.is_open else 0

    @property
    def is_busy(self) -> bool:
        """Whether pages wait to be written."""
        return bool(self._unwritten)

    def __contains__(self, page_hash: PageHash) -> bool:
        if not self.is_open:
            return False
        if page_hash in self._unwritten:
            return True
        return page_hash in self._store and not self._removed[page_hash]

    def __len__(self) -> int:
        if not self.is_open:
            return 0
        return len(self._store) + sum(page_hash not in self._store for page_hash in self._unwritten)

    @property
    def n_written(self) -> int:
        """Pages in the file, without those that wait to be written."""
        return len(self._store) if self.is_open else 0

    def hashes(self) -> list[PageHash]:
        """All pages in the file, longest unused first."""
        return self._store.hashes() if self.is_open else []

    def idle(self, before_ns: int) -> list[PageHash]:
        """Pages in the file whose last use was before `before_ns` (ns since 1970), longest unused first."""
        if not self.is_open:
            return []
        return [page_hash for page_hash in self._store.idle(before_ns) if not self._removed[page_hash]]

    # -------------------------------------------------------------- writing

    def save(self, page_hash: PageHash, record: bytes, content: np.ndarray) -> bool:
        """Queue a copy of the page. False: too much is queued, the disk pauses, or the file is not open."""
        if not self.is_open:
            return False
        if page_hash in self._unwritten:
            return True
        if page_hash in self:
            self.touch(page_hash)
            return True
        page_bytes = self._store.page_bytes
        is_full = self._n_queued and (self._n_queued + 1) * page_bytes > QUEUED_BYTES
        if is_full or self._store.is_write_paused or not self._has_room:
            return False
        copy = content.copy()
        self._unwritten[page_hash] = record, copy
        self._n_queued += 1

        def write() -> None:
            is_written = False
            try:
                is_written = not self._is_closing and self._store.save(page_hash, record, copy)
            finally:
                self._finish(_Result("write", page_hash, is_written, content=copy))

        self._jobs.put(write)
        return True

    def touch(self, page_hash: PageHash) -> None:
        """Count a use."""
        with self._touched_lock:
            if not self._touched:
                self._jobs.put(self._count_uses)
            self._touched[page_hash] = None

    def _count_uses(self) -> None:
        with self._touched_lock:
            touched, self._touched = self._touched, {}
        for page_hash in touched:
            if page_hash in self._store:
                self._store.touch(page_hash)

    def remove(self, page_hash: PageHash, most_uses: int = MAX_USES) -> None:
        """Remove a page, if it is there and no more sequences have held it. Until that is known it is not there."""
        if page_hash not in self:
            return
        if page_hash in self._unwritten:
            if n_uses(self._unwritten[page_hash][0]) > most_uses:
                return
            del self._unwritten[page_hash]
        self._removed[page_hash] += 1

        def remove() -> None:
            try:
                self._store.remove(page_hash, most_uses)
            finally:
                self._finish(_Result("remove", page_hash))

        self._jobs.put(remove)

    @property
    def is_removing(self) -> bool:
        """Whether the thread has yet to remove pages."""
        return bool(self._removed) and self.error is None and not self._is_closing

    def list_pages(self, wants: Callable[[bytes], bool] | None, on_listed: Callable[[list[PageHash]], object]) -> bool:
        """Have the thread list the pages whose records it `wants` (None: all); `poll` calls `on_listed` with them.

        False: the file is not open.
        """
        if not self.is_open or self._is_closing:
            return False

        def list_them() -> None:
            found: list[PageHash] = []
            try:
                if not self._is_closing:
                    found = self._store.matching(wants)
            finally:
                self._finish(_Result("list", _NO_HASH, hashes=found, on_listed=on_listed))

        self._jobs.put(list_them)
        return True

    def rank_pages(self, limit: int, is_present: Container[PageHash], on_ranked: OnRanked) -> bool:
        """Have the thread find the most used pages, at most `limit`; `poll` calls `on_ranked` with them.

        `is_present`: pages that are in the arena already.  False: the file is not open.
        """
        if not self.is_open or self._is_closing:
            return False

        def rank() -> None:
            found: list[RankedPage] = []
            try:
                if not self._is_closing:
                    found = self._store.most_used(limit, is_present.__contains__)
            finally:
                self._finish(_Result("rank", _NO_HASH, ranked=found, on_ranked=on_ranked))

        self._jobs.put(rank)
        return True

    def add_uses(self, uses: list[tuple[PageHash, int, int]]) -> None:
        """Queue counting (page, uses, last use in ns since 1970); without room they are not counted."""
        if self.is_open and not self._is_closing and self._has_room:
            self._jobs.put(lambda: self._store.add_uses(uses))

    def compact(self, limit: int) -> bool:
        """Queue moving at most `limit` pages into holes. Whether more remained after the last time."""
        if self.is_open and not self._is_compacting and self._has_room and self._store.has_excess_holes:
            self._is_compacting = True

            def compact() -> None:
                try:
                    self._has_more_holes = not self._is_closing and self._store.compact(limit)
                finally:
                    self._is_compacting = False

            self._jobs.put(compact)
        return self._has_more_holes

    @property
    def _has_room(self) -> bool:
        return self._jobs.qsize() < MAX_JOBS

    # -------------------------------------------------------------- reading

    def prefetch(self, hashes: Iterable[PageHash]) -> None:
        """Nothing: `fetch` reads no disk."""

    @property
    def room_ahead(self) -> int:
        """Pages that `read_ahead` can have read beside those that it has; 0 before the file is open."""
        if not self.is_open:
            return 0
        n_reading = sum(page_hash in self._wanted for page_hash in self._reading)  # the others are not read any more
        return max(0, STAGED_BYTES // self._store.page_bytes - len(self._staged) - n_reading)

    def is_ahead(self, page_hash: PageHash) -> bool:
        """Whether the page was read ahead, or will be, or waits to be written."""
        return self.can_fetch(page_hash) or (page_hash in self._reading and page_hash in self._wanted)

    def read_ahead(self, hashes: Iterable[PageHash], is_use: bool = True) -> list[PageHash]:
        """Read pages, in order, up to the bound. Returns those to `release` later.

        `is_use`: a sequence needs them.  A page that is released before the thread has come to it is not read.
        """
        wanted: list[PageHash] = []
        new: list[PageHash] = []
        room = self.room_ahead
        if not self.is_open:
            return wanted
        for page_hash in hashes:
            if not self.is_ahead(page_hash):
                if self._store.is_read_paused or not self._has_room or not room:
                    break
                room -= 1
                if page_hash not in self._reading:  # or it is queued, and was not wanted any more
                    self._reading.add(page_hash)
                    new.append(page_hash)
            self._wanted[page_hash] += 1
            wanted.append(page_hash)
        if new:
            self._jobs.put(lambda: self._store.prefetch(new))
            for page_hash in new:
                self._queue_read(page_hash, is_use)
        return wanted

    def _queue_read(self, page_hash: PageHash, is_use: bool) -> None:
        self._jobs.put(lambda: self._read(page_hash, is_use))

    def is_reading(self, page_hash: PageHash) -> bool:
        """Whether the thread has yet to read the page."""
        return page_hash in self._reading

    def release(self, hashes: Iterable[PageHash]) -> None:
        """End a `read_ahead`."""
        for page_hash in hashes:
            self._wanted[page_hash] -= 1
            if self._wanted[page_hash] <= 0:
                del self._wanted[page_hash]
                self._staged.pop(page_hash, None)

    def can_fetch(self, page_hash: PageHash) -> bool:
        """Whether the page was read ahead, or waits to be written."""
        return page_hash in self._staged or page_hash in self._unwritten

    def fetch(self, page_hash: PageHash, out: np.ndarray) -> PageIdentity | None:
        """Copy a page that was read ahead, or waits to be written, into `out` (page_bytes,) u8; None: neither."""
        identity: PageIdentity | None
        if page_hash in self._staged:
            identity, content = self._staged[page_hash]
        elif page_hash in self._unwritten:
            record, content = self._unwritten[page_hash]
            identity = _checked(record, content)
            if identity is None:
                return None
        else:
            return None
        np.copyto(out, content)
        return identity

    # -------------------------------------------------------------- the thread

    def poll(self) -> None:
        """Take the results of the thread."""
        while self._results:
            result = self._results.popleft()
            page_hash = result.page_hash
            if result.kind == "read":
                self._reading.discard(page_hash)
                if result.identity is not None and result.content is not None and self._wanted[page_hash]:
                    self._staged[page_hash] = result.identity, result.content
            elif result.kind == "skip":
                if self._wanted[page_hash] and not self._is_closing:  # again, since the thread skipped it
                    self._queue_read(page_hash, is_use=True)
                else:
                    self._reading.discard(page_hash)
            elif result.kind == "rank":
                assert result.on_ranked is not None
                result.on_ranked(result.ranked or [])
            elif result.kind == "remove":
                self._removed[page_hash] -= 1
                if not self._removed[page_hash]:
                    del self._removed[page_hash]
            elif result.kind == "lost":
                for lost in result.hashes or []:
                    if lost not in self:  # or it was saved again
                        self._on_lost(lost)
            elif result.on_listed is not None:
                result.on_listed(result.hashes or [])
            else:
                self._n_queued -= 1
                self._end_write(page_hash, result.content)
                if not result.is_written:
                    self._on_lost(page_hash)

    def _end_write(self, page_hash: PageHash, content: np.ndarray | None) -> None:
        record, queued = self._unwritten.get(page_hash, (b"", None))
        if queued is None or queued is not content:  # it was removed meanwhile, and perhaps saved again
            return
        del self._unwritten[page_hash]
        identity = _checked(record, queued) if self._wanted[page_hash] else None
        if identity is not None:  # `read_ahead` has counted on this copy
            self._staged[page_hash] = identity, queued

    def _read(self, page_hash: PageHash, is_use: bool) -> None:
        if page_hash not in self._wanted:
            self._finish(_Result("skip", page_hash))
            return
        identity = content = None
        try:
            if not self._is_closing:
                content = np.empty(self._store.page_bytes, np.uint8)
                identity = self._store.fetch(page_hash, content, is_use)
        finally:
            self._finish(_Result("read", page_hash, identity=identity, content=content))

    def _finish(self, result: _Result) -> None:
        self._results.append(result)
        self._wake()

    def _run(self) -> None:
        with _file_locks.setdefault(self.path, threading.Lock()):
            try:
                self._opened = self._open_store() if not self._is_closing else None
            except Exception as error:  # whatever it is: what waits for the file goes on
                self.error = error
            finally:
                self._has_tried.set()
                self._wake()
            if self._opened is None:
                return
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except Exception:
                    log.exception("a page could not be read or written", extra={"path": str(self.path)})
                if lost := self._opened.take_lost():
                    self._finish(_Result("lost", _NO_HASH, hashes=lost))
            self._opened.close()

    def close(self) -> None:
        """End the thread after the job in progress; pages that wait are not written. Idempotent, does not wait."""
        self._is_closing = True
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, at most `timeout_s`."""
        self._thread.join(timeout_s)


def _checked(record: bytes, content: np.ndarray) -> PageIdentity | None:
    """The identity of a page that waits to be written; None if it was damaged in the arena."""
    identity = unpack_identity(record)
    return identity if identity is not None and checksum(content) == identity.checksum else None
