"""Calls that wait for one thread, such as that of a SQLite file: counted, and refused beyond a bound.

A file that does not answer keeps its thread, and every call behind it.  Those whose caller waits are refused when too
many wait, in all or of one tenant.  Those that must not be lost are added all the same (`add`): what makes them asks
`check` before it begins.

The order is that of the calls, also of different tenants: a read finds what was written before it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class CallQueue:
    """One thread and the calls that wait for it. May be used by several threads."""

    def __init__(self, purpose: str, most: int, most_of_tenant: int, full: Callable[[int, str], Exception]) -> None:
        """`most`: calls, with the one that runs. `full(n, whose)`: the error for one beyond `n` "in all"/"of a tenant".

        most_of_tenant: calls of one tenant that is named.
        """
        self._thread = ThreadPoolExecutor(1, purpose)
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._full = full
        self._counting = threading.Lock()
        self._waiting: Counter[str] = Counter()  # by tenant; with calls whose callers have left

    def __len__(self) -> int:
        """Calls that wait, and the one that runs."""
        with self._counting:
            return self._waiting.total()

    def check(self, tenant: str = "") -> None:
        """Raises the error of a full queue if there is no room for a call of a tenant; "": of none."""
        with self._counting:
            total, own = self._waiting.total(), self._waiting[tenant] if tenant else 0
        if total >= self._most:
            raise self._full(self._most, "in all")
        if own >= self._most_of_tenant:
            raise self._full(self._most_of_tenant, "of a tenant")

    async def call(self, work: Callable[[], T], tenant: str = "") -> T:
        """The result of a call. Raises its error, or that of a full queue. Cancelled in time, the call is not made."""
        self.check(tenant)
        return await asyncio.wrap_future(self.add(work, tenant))

    def add(self, work: Callable[[], T], tenant: str = "") -> Future[T]:
        """Add a call, also to a full queue. Raises `RuntimeError` after `close`."""
        answer: Future[T] = Future()

        def run() -> None:
            result, error = None, None
            is_wanted = answer.set_running_or_notify_cancel()
            try:
                result = work() if is_wanted else None
            except BaseException as problem:
                error = problem
            self._count(tenant, -1)  # first: who gets the answer finds room
            if error is not None:
                answer.set_exception(error)
            elif is_wanted:
                answer.set_result(result)  # type: ignore[arg-type]

        self._count(tenant, 1)
        try:
            self._thread.submit(run)
        except RuntimeError:
            self._count(tenant, -1)
            raise
        return answer

    def close(self, *, wait: bool) -> None:
        """Take no more calls. Those that wait are made. `wait`: for their end. Idempotent."""
        self._thread.shutdown(wait=wait)

    def _count(self, tenant: str, change: int) -> None:
        with self._counting:
            self._waiting[tenant] += change
            if not self._waiting[tenant]:
                del self._waiting[tenant]
