"""Calls in threads: those that outlast the cancellation of their task, and those that have threads of their own.

The threads of the event loop (`asyncio.to_thread`) are few, and also look up names: calls that may wait for a disk or
another process, without a bound, would take them from everything else.  `Threads` bounds what such calls of one purpose
can occupy.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """At most `most` threads for calls of one purpose. Further calls wait for one of them. Used in event loops.

    A thread is started when it is needed.
    """

    def __init__(self, purpose: str, most: int) -> None:
        self._threads = ThreadPoolExecutor(most, purpose)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in one of the threads.

        Cancelled, it returns at once: a call that has begun goes on, one that still waits is not made.
        """
        call: Callable[[], T] = partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def uninterrupted(self, function: Callable[..., T], *arguments: Any) -> T:
        """The same, but cancelled it waits for the end of the call, which is made."""
        return await _ended(self.run(function, *arguments))

    def close(self) -> None:
        """Take no more calls. Those that were made end by themselves. Idempotent."""
        self._threads.shutdown(wait=False)


async def uninterrupted(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread. Cancelled, wait for its end first: it uses a file that is closed afterwards."""
    return await _ended(asyncio.to_thread(function, *arguments))


async def _ended(calling: Coroutine[Any, Any, T]) -> T:
    """The result of a call; cancelled, wait for its end first."""
    call = asyncio.ensure_future(calling)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([call])
        raise
