"""The queue of long texts: one background thread runs a step of each in turn, so that none waits for another.

Tenants take turns, and within a tenant its texts: a tenant with many of them delays the others by a step in each round.

Owns the queue and the thread's loop; independent of frames and sockets.  The stage's thread calls `submit`, `drop`,
`drop_client` and `take_results`; only the background thread runs the jobs.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from pipeline.tenant_turns import TenantTurns

MAX_JOBS = 3072  # queued or running; a gateway sends no more requests at once
MAX_CHARACTERS = 256 << 20  # of all jobs together; one job of any size is always accepted

Result = TypeVar("Result")


class _Job(Generic[Result]):
    __slots__ = ("characters", "client", "is_dropped", "name", "steps", "tenant")

    def __init__(
        self, client: bytes, name: str, tenant: str, characters: int, steps: Generator[None, None, Result]
    ) -> None:
        self.client = client
        self.name = name
        self.tenant = tenant
        self.characters = characters
        self.steps = steps
        self.is_dropped = False


class EncodeQueue(Generic[Result]):
    """A bounded queue of generators, in turns. The thread that calls `run` calls `on_done()` after each job.

    A tenant has at most three quarters of the jobs and of their characters.
    """

    def __init__(
        self, on_done: Callable[[], None], max_jobs: int = MAX_JOBS, max_characters: int = MAX_CHARACTERS
    ) -> None:
        self._on_done = on_done
        self._max_jobs, self._max_characters = max_jobs, max_characters
        self._changed = threading.Condition()
        self._waiting: TenantTurns[_Job[Result]] = TenantTurns()
        self._running: _Job[Result] | None = None
        self._unfinished: set[_Job[Result]] = set()  # waiting, or running a step
        self._named: dict[tuple[bytes, str], _Job[Result]] = {}  # the last of each client and name
        self._results: deque[tuple[bytes, Result]] = deque()
        self._characters = 0  # of the unfinished jobs
        self._jobs_of: Counter[str] = Counter()  # unfinished ones, by tenant
        self._characters_of: Counter[str] = Counter()  # likewise
        self._is_stopped = False

    @property
    def is_busy(self) -> bool:
        """True while a job is unfinished or a result has not been taken."""
        return bool(self._unfinished or self._results)

    def submit(
        self,
        client: bytes,
        characters: int,
        steps: Generator[None, None, Result],
        tenant: str = "",
        name: str = "",
    ) -> bool:
        """Add a job; False if the queue is full, or the tenant's part of it. `steps` must not raise.

        `tenant`: "" if it is none's.  `name`: of the job among its client's, for `drop`.
        """
        with self._changed:
            is_full = len(self._unfinished) >= self._max_jobs or self._characters + characters > self._max_characters
            if (is_full or self._is_full_for(tenant, characters)) and self._unfinished:
                return False
            job = _Job(client, name, tenant, characters, steps)
            self._unfinished.add(job)
            self._named[client, name] = job
            self._waiting.add(tenant, job)
            self._characters += characters
            self._jobs_of[tenant] += 1
            self._characters_of[tenant] += characters
            self._changed.notify()
        return True

    def _is_full_for(self, tenant: str, characters: int) -> bool:
        """Whether the rest of the queue is for other tenants."""
        most_jobs = self._max_jobs - self._max_jobs // 4
        most_characters = self._max_characters - self._max_characters // 4
        has_most = self._jobs_of[tenant] >= most_jobs or self._characters_of[tenant] + characters > most_characters
        return bool(tenant) and has_most

    def drop(self, client: bytes, name: str) -> None:
        """Drop a job whose result is not needed, if it is unfinished."""
        with self._changed:
            if (job := self._named.get((client, name))) is not None:
                self._drop(job)

    def drop_client(self, client: bytes) -> None:
        """Drop the client's jobs: it has disconnected, and their results are not needed."""
        with self._changed:
            for job in [job for job in self._unfinished if job.client == client]:
                self._drop(job)

    def _drop(self, job: _Job[Result]) -> None:
        """Remove a job now, or after the step that it runs."""
        job.is_dropped = True
        if job is not self._running:
            self._waiting.remove(job.tenant, job)
            self._remove(job)

    def take_results(self) -> list[tuple[bytes, Result]]:
        """Return (client, result) of the jobs that have finished since the last call."""
        with self._changed:
            results = list(self._results)
            self._results.clear()
        return results

    def stop(self) -> None:
        """End `run` after the step in progress and drop all unfinished jobs."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def run(self) -> None:
        """Run jobs until `stop`. An exception of a job ends the loop."""
        while (job := self._next()) is not None:
            try:
                next(job.steps)
                self._after_step(job)
            except StopIteration as end:
                self._after_step(job, end)
            del job  # otherwise its text would stay in memory until the next job

    def _next(self) -> _Job[Result] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopped)
            self._running = None if self._is_stopped else self._waiting.take()
            return self._running

    def _after_step(self, job: _Job[Result], end: StopIteration | None = None) -> None:
        with self._changed:
            self._running = None
            if end is None and not job.is_dropped:
                self._waiting.add(job.tenant, job)
                return
            if end is not None and not job.is_dropped:
                self._results.append((job.client, end.value))  # before the job goes: `is_busy` is read without the lock
            self._remove(job)
        self._on_done()

    def _remove(self, job: _Job[Result]) -> None:
        self._unfinished.discard(job)
        if self._named.get((job.client, job.name)) is job:  # another of this name may have come since it was dropped
            del self._named[job.client, job.name]
        self._characters -= job.characters
        self._jobs_of[job.tenant] -= 1
        self._characters_of[job.tenant] -= job.characters
        if not self._jobs_of[job.tenant]:
            del self._jobs_of[job.tenant], self._characters_of[job.tenant]
