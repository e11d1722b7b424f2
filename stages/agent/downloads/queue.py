"""Which downloads run. One for each key, however many callers want it; only so many at once, in the order of arrival.

A download that no caller wants any more is cancelled. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from pipeline.errors import Overloaded

T = TypeVar("T")


class _Job(Generic[T]):
    """A download, and how many callers wait for it."""

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.callers = 0


class DownloadQueue(Generic[T]):
    """At most `at_once` downloads run and `most` are wanted. Used in one event loop."""

    def __init__(self, at_once: int, most: int = 256) -> None:
        self._running = asyncio.Semaphore(at_once)
        self._most = most
        self._jobs: dict[str, _Job[T]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    async def wait_for(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of the download `key`, started by `work` if there is none. Raises what it raises, `Overloaded`.

        A cancelled caller leaves it; the last one to leave cancels the download and waits for its end.
        """
        job = self._jobs.get(key)
        if job is None:
            if len(self._jobs) >= self._most:
                raise Overloaded(f"{len(self._jobs)} downloads are queued, at most {self._most}: try again later")
            job = _Job(asyncio.create_task(self._run(key, work)))
            self._jobs[key] = job
        job.callers += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.callers -= 1
            if not job.callers and not job.task.done():
                # Another caller that comes now starts anew, after this one has released its files.
                self._jobs.pop(key, None)
                job.task.cancel()
                await asyncio.wait([job.task])

    async def _run(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        this = asyncio.current_task()
        try:
            async with self._running:
                return await work()
        finally:
            job = self._jobs.get(key)
            if job is not None and job.task is this:
                del self._jobs[key]
