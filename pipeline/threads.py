"""Calls in threads that outlast the cancellation of their task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def uninterrupted(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread. Cancelled, wait for its end first: it uses a file that is closed afterwards."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([call])
        raise
