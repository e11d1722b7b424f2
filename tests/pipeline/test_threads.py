"""A cancelled task ends only after the call that it made in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pipeline.threads import uninterrupted


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_call_is_waited_for(times: int) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait()
        ended.set()

    task = asyncio.ensure_future(uninterrupted(call))
    await asyncio.to_thread(begun.wait)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_results_and_errors_pass() -> None:
    assert await uninterrupted(max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        await uninterrupted(divmod, 1, 0)
