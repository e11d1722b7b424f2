"""Attempts with exponential backoff. A store's `Retry-After` is honoured up to a bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.errors import StorageUnavailable

ATTEMPTS = 6
FIRST_S = 0.25  # after the first failure; doubled after each further one
MOST_S = 20.0  # a longer Retry-After is cut: the attempt then fails, and costs the store one request

Sleep = Callable[[float], Awaitable[object]]
T = TypeVar("T")


def delay_s(failures: int, retry_after_s: float, jitter: float) -> float:
    """Pause after `failures` failed attempts (from 1). `jitter`, in [0, 1), spreads clients that failed together."""
    backoff = min(MOST_S, FIRST_S * 2.0 ** (min(failures, 16) - 1))
    return min(MOST_S, max(retry_after_s, backoff)) * (0.75 + 0.5 * jitter)


async def retried(
    call: Callable[[], Awaitable[T]],
    *,
    attempts: int = ATTEMPTS,
    sleep: Sleep = asyncio.sleep,
    jitter: Callable[[], float] = random.random,
) -> T:
    """The result of `call`, repeated while it raises `StorageUnavailable`; the last attempt's error passes."""
    for failures in range(1, attempts):
        try:
            return await call()
        except StorageUnavailable as error:
            await sleep(delay_s(failures, error.retry_after_s, jitter()))
    return await call()
