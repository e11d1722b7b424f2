"""A cancelled task ends only after the call that it made in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pipeline.threads import Threads, uninterrupted


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


async def test_a_cancelled_call_goes_on_if_it_has_begun_and_is_not_made_if_it_waits() -> None:
    threads, begun, go_on = Threads("test", 1), threading.Event(), threading.Event()
    made: list[str] = []

    def call() -> None:
        begun.set()
        go_on.wait()
        made.append("first")

    first = asyncio.ensure_future(threads.run(call))
    await asyncio.to_thread(begun.wait)
    second = asyncio.ensure_future(threads.run(made.append, "second"))
    third = asyncio.ensure_future(threads.uninterrupted(made.append, "third"))
    await asyncio.sleep(0)
    for task in (first, second, third):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert first.cancelled() and second.cancelled() and not third.done() and made == []
    go_on.set()
    await asyncio.gather(third, return_exceptions=True)
    assert made == ["first", "third"]
    threads.close()
