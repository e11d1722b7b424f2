"""The bodies of `/metrics`: rendered in a thread, one at a time, for all who wait. Used by gateways and orchestrators.

`/metrics` needs no key, and its cost grows with the number of models and tenants.  Between two renderings for clients
without one there is a pause, so that they take at most a tenth of the time, or, if they take long, begin more than a
second apart.  Who asks meanwhile waits for the next body of the variant: none is older than its request.

Variants that are not paced wait for the rendering under way, and for no pause.  An agent reads the queue of its engine
that way, and takes an engine for silent that does not answer within seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

PAUSE = 9.0  # after rendering, as a multiple of the time that it took
MAX_PAUSE_S = 1.0


class Variant(NamedTuple):
    """What is asked for."""

    shows_tenants: bool
    is_open_metrics: bool = False
    is_paced: bool = True  # False: for a key that may read metrics


class Scrapes:
    """One per application. Used in its event loop."""

    def __init__(
        self,
        prepare: Callable[[Variant], Callable[[], bytes]],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`prepare` copies what is to be rendered; what it returns is called in a thread. `clock`, `pause`: in s."""
        self._prepare = prepare
        self._clock = clock
        self._pause = pause
        self._waiting: dict[Variant, asyncio.Task[bytes]] = {}  # that have not begun
        self._line = asyncio.Lock()  # of those that are paced: their pauses must not hold up others
        self._turn = asyncio.Lock()  # to render
        self._not_before = float("-inf")  # of the next one that is paced

    async def body(self, variant: Variant) -> bytes:
        """The metrics of a moment after the call."""
        task = self._waiting.get(variant)
        if task is None:
            task = self._waiting[variant] = asyncio.get_running_loop().create_task(self._render(variant))
        return await asyncio.shield(task)  # others wait for it, too

    async def _render(self, variant: Variant) -> bytes:
        if not variant.is_paced:
            return await self._text(variant)
        async with self._line:
            await self._pause(max(0.0, self._not_before - self._clock()))
            return await self._text(variant)

    async def _text(self, variant: Variant) -> bytes:
        async with self._turn:
            del self._waiting[variant]
            begun = self._clock()
            try:
                return await asyncio.to_thread(self._prepare(variant))
            finally:
                if variant.is_paced:
                    now = self._clock()
                    self._not_before = now + min(MAX_PAUSE_S, PAUSE * (now - begun))
