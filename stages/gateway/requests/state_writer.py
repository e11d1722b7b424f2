"""The thread that writes the gateway's state files, so that a slow disk delays no stream.

    journal   `open` calls back when the record is written; only then is the request submitted
              `when_written` calls back when an end is written: only then is the end of some answers sent
    quotas    `put` stores a level; of several levels of a bucket only the last one is written

The records are written in the order of the calls, so the charges of a request are written before its journal record.
A second thread synchronizes the files, at most once at a time, when `sync` is called.

Everything is called by the event loop.  Only the jobs run on the thread, which alone uses the journal and the quota
file for more than look-ups.  A request in flight has at most four jobs here, so the queue is bounded by them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.api.quota_file import Level, QuotaFile
from pipeline.faults import points
from stages.gateway.requests.journal import Journal, JournalEntry, RequestEnd
from stages.gateway.requests.spec import RequestSpec

log = logging.getLogger("starling.gateway.journal")

CLOSE_S = 2.0  # `close` waits for the jobs in progress for this long


class StateWriter:
    """Owns `journal` and `quotas`; each is None when it is off."""

    def __init__(self, journal: Journal | None, quotas: QuotaFile | None = None) -> None:
        self._journal = journal
        self._quotas = quotas
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._levels: dict[bytes, Level] = {}  # that wait to be written, by bucket
        self._are_levels_queued = False
        self._levels_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._journal_points = points.DiskPoints("journal")
        self._quota_points = points.DiskPoints("quotas")
        self._sync_thread = ThreadPoolExecutor(1, "state-sync")
        self._syncs: list[Future[None]] = []  # in progress
        self._has_written = self._is_sync_queued = False

    # ---------------------------------------------------------------- journal

    @property
    def has_journal(self) -> bool:
        """Whether requests are journaled."""
        return self._journal is not None

    @property
    def left_out(self) -> int:
        """Requests that are not in the journal, or whose end is not."""
        return self._journal.left_out if self._journal is not None else 0

    @property
    def unreadable(self) -> int:
        """Journals that could not be read and were renamed."""
        return self._journal.unreadable if self._journal is not None else 0

    @property
    def errors(self) -> dict[str, int]:
        """Failed operations on the files, by kind."""
        files = {"journal": self._journal, "quotas": self._quotas}
        return {name: file.errors.count for name, file in files.items() if file is not None}

    def take_entries(self) -> list[JournalEntry]:
        """The entries found at the start, in order. A second call returns none."""
        return self._journal.take_entries() if self._journal is not None else []

    def open(self, spec: RequestSpec, on_written: Callable[[bool], object] = lambda is_written: None) -> None:
        """Write a request. `on_written` is called, by the thread, when it is written (True) or left out (False)."""
        journal = self._journal
        if journal is None:
            on_written(False)
            return

        def write() -> None:
            is_written = False
            try:
                is_written = journal.open(spec)
            finally:
                on_written(is_written)

        self._put(write)

    def end(self, end: RequestEnd, is_kept: bool, is_pinned: bool = False) -> None:
        """Write the end of a request. `is_kept`: clients may ask for its answer after a restart.

        `is_pinned`: until `forget` is called.
        """
        if self._journal is not None:
            journal = self._journal
            self._put(lambda: journal.end(end, is_kept, is_pinned))

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended from the journal."""
        if self._journal is not None:
            journal = self._journal
            self._put(lambda: journal.forget(request_id), is_write=False)

    def when_written(self, then: Callable[[], object]) -> None:
        """Call `then` on the event loop when what was given to the journal before is written, or left out."""
        if self._journal is None:
            then()
            return
        loop = asyncio.get_running_loop()

        def call() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(then)

        self._put(call, is_write=False)

    async def drop(self, request_id: str) -> None:
        """Drop a request that has ended from the journal, also for a successor: that is written on return."""
        if self._journal is None:
            return
        journal = self._journal
        written: Future[None] = Future()
        written.set_running_or_notify_cancel()  # it is written also if the caller is cancelled

        def write() -> None:
            try:
                journal.drop(request_id)
            finally:
                written.set_result(None)

        self._put(write)
        await asyncio.wrap_future(written)

    # ---------------------------------------------------------------- quotas

    def level_of(self, key: bytes) -> Level | None:
        """The level that was stored last for the bucket `key`."""
        if self._quotas is None:
            return None
        with self._levels_lock:
            waiting = self._levels.get(key)
        return waiting if waiting is not None else self._quotas.level_of(key)

    def put(self, key: bytes, level: Level) -> None:
        """Store the level of the bucket `key`, a result of `bucket_key`. Never raises."""
        if self._quotas is None:
            return
        with self._levels_lock:
            self._levels[key] = level
            is_queued, self._are_levels_queued = self._are_levels_queued, True
        if not is_queued:
            self._put(self._write_levels)

    def _write_levels(self) -> None:
        assert self._quotas is not None
        with self._levels_lock:
            self._are_levels_queued = False
            levels = dict(self._levels)
        for key, level in levels.items():
            self._quotas.put(key, level)
        with self._levels_lock:  # those that were written are in the quota file's own table
            for key, level in levels.items():
                if self._levels.get(key) is level:
                    del self._levels[key]

    # ---------------------------------------------------------------- the disk

    def sync(self) -> None:
        """Write what was stored to the disk, on another thread, unless it is busy with that. At each tick."""
        self._syncs = [sync for sync in self._syncs if not sync.done()]
        if self._has_written and not self._syncs and not self._is_sync_queued:
            self._has_written, self._is_sync_queued = False, True
            self._put(self._begin_sync, is_write=False)
        elif not self._jobs.empty():
            self._start()

    def _begin_sync(self) -> None:
        try:
            for disk, file in ((self._journal_points, self._journal), (self._quota_points, self._quotas)):
                fd = file.unsynced() if file is not None else None
                if file is not None and fd is not None:
                    self._syncs.append(self._sync_thread.submit(_sync_and_close, disk, fd, file))
        finally:
            self._is_sync_queued = False

    def close(self) -> None:
        """End the threads after their jobs, waiting at most `CLOSE_S`. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(CLOSE_S)
        self._sync_thread.shutdown(wait=False, cancel_futures=True)
        if thread is None or not thread.is_alive():
            for file in (self._journal, self._quotas):
                if file is not None:
                    file.close()

    def _put(self, job: Callable[[], object], is_write: bool = True) -> None:
        self._has_written = self._has_written or is_write
        self._jobs.put(job)
        self._start()

    def _start(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="state", daemon=True)
            with contextlib.suppress(RuntimeError):  # there are too many: the next job or tick has another attempt
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a state file could not be written")


def _sync_and_close(disk: points.DiskPoints, fd: int, file: Journal | QuotaFile) -> None:
    """Flush the descriptor `fd` of `file` to the disk and close it, in a thread. An error is counted and logged."""
    try:
        disk.sync.hit()
        os.fdatasync(fd)
    except OSError as error:
        file.errors.failed("sync", file.path, error)
    else:
        file.errors.worked("sync")
    finally:
        os.close(fd)
