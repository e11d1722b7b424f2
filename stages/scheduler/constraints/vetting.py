"""Vetting: every new constraint is compiled on trial in a process of its own before its sequence is queued.

One constraint at a time, tenants in turn.  One that takes longer than the limit, or twice ends the process, is refused;
the next ones continue in a new process.  The limit is one of CPU time, and begins when the process has started: what is
refused does not depend on how busy the machine is.  Constraints that have passed are remembered.  Pure: frames gather
in `frames`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from pipeline.protocol.messages import Constraint, Frame
from pipeline.tenant_turns import TenantTurns
from stages.scheduler.constraints.frames import Begun, Vet, Vetted

MAX_PASSED = 2048  # constraints that are remembered
MAX_TENANT_JOBS = 64  # constraints of one tenant that wait
MAX_JOBS = 256  # in all; then one of a tenant without a waiting one takes the place of another tenant's newest one
# A process that has no result after so many times the limit hangs, even if it used no CPU time.  On a machine whose
# cores are all busy a process of low priority has a fiftieth of a core.
MAX_DELAY = 60
MAX_ENDS = 2  # of the process while it compiles a constraint: once it may have been killed for another reason
MAX_STARTS = 5  # of the process for a constraint, if it ends before it begins with that

Key = tuple[str, Constraint]  # version; the field is part of it, for the error messages


class Waiter(NamedTuple):
    """A submission that waits for its constraint. One of the two is called, unless it is cancelled."""

    on_vetted: Callable[[str, float], None]  # with the error, "" if there is none, and the time
    on_displaced: Callable[[], None]  # too many constraints wait: another tenant's has the place of this one


class VettingFullError(Exception):
    """Too many constraints wait, of this tenant or in all."""


class _Job:
    """A constraint that waits, or is being compiled."""

    __slots__ = ("tenant", "waiters")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant  # that it waits in the queue of
        self.waiters: list[Waiter] = []


class Vetting:
    """One for each scheduler."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: most CPU time for one constraint."""
        self.frames: list[Frame] = []  # for the trial process
        self.limit_s = limit_s
        self._passed: OrderedDict[Key, None] = OrderedDict()
        self._waiting: TenantTurns[Key] = TenantTurns()
        self._jobs: dict[Key, _Job] = {}
        self._current: Key | None = None
        self._id = 0
        self._starts = self._ends = 0  # of the trial process for the current constraint
        self._has_begun = False
        self._deadline = 0.0
        self._cpu_limit_s = float("inf")  # of the process, when the current constraint has had its time

    @property
    def is_busy(self) -> bool:
        """Some constraint waits for its result."""
        return bool(self._jobs)

    def has_passed(self, version: str, constraint: Constraint) -> bool:
        """The constraint is known to work."""
        key = (version, constraint)
        if key not in self._passed:
            return False
        self._passed.move_to_end(key)
        return True

    def vet(self, version: str, constraint: Constraint, tenant: str, waiter: Waiter, now: float) -> None:
        """Call the waiter when the result is there. Raises `VettingFullError`."""
        key = (version, constraint)
        job = self._jobs.get(key)
        if job is None:
            if len(self._waiting.of(tenant)) >= MAX_TENANT_JOBS:
                raise VettingFullError
            if len(self._jobs) >= MAX_JOBS:
                self._make_room(tenant)
            self._waiting.add(tenant, key)
            job = self._jobs[key] = _Job(tenant)
        job.waiters.append(waiter)
        self._start_next(now)

    def _make_room(self, tenant: str) -> None:
        """Remove the newest constraint of the longest queue for one of `tenant`. Raises `VettingFullError`."""
        longest = self._waiting.longest()
        if self._waiting.of(tenant) or len(longest) < 2:
            raise VettingFullError
        for waiter in self._remove(longest[-1]).waiters:
            waiter.on_displaced()

    def cancel(self, version: str, constraint: Constraint, waiter: Waiter) -> None:
        """The submission does not wait any more. If none does, a constraint whose compilation has not begun goes."""
        key = (version, constraint)
        job = self._jobs.get(key)
        if job is None or waiter not in job.waiters:
            return
        job.waiters.remove(waiter)
        if not job.waiters and key != self._current:
            self._remove(key)

    def forget(self, version: str) -> None:
        """The version is unloaded: no constraint waits for it, and no waiter is called."""
        for key in [key for key in self._jobs if key[0] == version]:
            if key == self._current:
                self._jobs[key].waiters.clear()
            else:
                self._remove(key)

    def _remove(self, key: Key) -> _Job:
        """Of a constraint whose compilation has not begun."""
        job = self._jobs.pop(key)
        self._waiting.remove(job.tenant, key)
        return job

    def _start_next(self, now: float) -> None:
        if self._current is not None or not self._waiting:
            return
        self._current = self._waiting.take()
        self._starts = self._ends = 0
        self._deadline = now + self.limit_s * MAX_DELAY
        self._send(*self._current)

    def _send(self, version: str, constraint: Constraint) -> None:
        self._id += 1
        self._starts += 1
        self._has_begun = False
        self._cpu_limit_s = float("inf")
        self.frames = [Vet(self._id, version, constraint)]

    def on_begun(self, frame: Begun, cpu_s: float) -> None:
        """The trial process, which has used `cpu_s` so far, begins with a constraint."""
        if frame.id == self._id:
            self._has_begun = True
            self._cpu_limit_s = cpu_s + self.limit_s

    def on_vetted(self, frame: Vetted, now: float) -> None:
        """The trial process's answer."""
        if frame.id == self._id and self._current is not None:
            self._end(frame.error, now)

    def on_died(self, now: float) -> None:
        """The trial process has ended. The constraint goes to the next one, unless it seems to be the reason."""
        if self._current is None:
            return
        self._ends += self._has_begun
        if self._ends < MAX_ENDS and self._starts < MAX_STARTS:
            self._send(*self._current)
        else:
            self._end("compiling it takes too much memory, or fails", now)

    def is_late(self, now: float, cpu_s: float) -> bool:
        """The current constraint has had its time: the process must be killed. Then call `on_late`.

        cpu_s: CPU time of the trial process so far.
        """
        return self._current is not None and (cpu_s > self._cpu_limit_s or now > self._deadline)

    def on_late(self, now: float) -> None:
        """The trial process was killed because `is_late`."""
        self._end(f"compiling it takes longer than {self.limit_s:g} s", now)

    def _end(self, error: str, now: float) -> None:
        key, self._current = self._current, None
        assert key is not None
        waiters = self._jobs.pop(key).waiters
        if not error and waiters:  # otherwise cancelled requests would displace constraints that are used
            self._passed[key] = None
            while len(self._passed) > MAX_PASSED:
                self._passed.popitem(last=False)
        self._start_next(now)
        for waiter in waiters:
            waiter.on_vetted(error, now)
