"""The watchdog of systemd for a process with one event loop: the keepalives come from that loop.

A loop that hangs sends none, and systemd restarts the unit (`WatchdogSec=`).  Agents and orchestrators use it; stages
send their keepalives at their ticks (stage_runtime.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from pipeline.runtime import process

T = TypeVar("T")


async def watched(work: Awaitable[T]) -> T:
    """The result of `work`; until it ends, systemd gets keepalives if it has asked for them."""
    interval_s = process.watchdog_interval_s()
    keepalives = asyncio.create_task(_send(interval_s)) if interval_s else None
    try:
        return await work
    finally:
        if keepalives is not None:
            keepalives.cancel()
            await asyncio.gather(keepalives, return_exceptions=True)


async def _send(interval_s: float) -> None:
    while True:
        process.sd_notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)
