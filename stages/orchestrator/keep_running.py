"""Keeps the parts of the orchestrator running that have no end. Called by the stage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger("starling.orchestrator")

AGAIN_S = 1.0  # after an error that was not expected


async def keep_running(
    work: Callable[[], Coroutine[Any, Any, None]], sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> None:
    """Do what has no end; again after an error that it does not expect, which no one else would see.

    A part that has nothing to do in this configuration may return.
    """
    while True:
        try:
            return await work()
        except Exception:
            log.exception("internal error of the orchestrator", extra={"work": work.__qualname__})
        await sleep(AGAIN_S)
