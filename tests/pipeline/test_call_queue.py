"""A queue of calls: bounds in all and of a tenant, order, and callers that leave."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from pipeline.call_queue import CallQueue
from pipeline.errors import StorageUnavailable


def full(n: int, whose: str) -> StorageUnavailable:
    return StorageUnavailable(f"{n} {whose}")


@pytest.fixture
def queue() -> Iterator[CallQueue]:
    found = CallQueue("test", 4, 2, full)
    yield found
    found.close(wait=True)


class Stall:
    """A call that ends when it is released."""

    def __init__(self, queue: CallQueue, tenant: str = "") -> None:
        self._may_end = threading.Event()
        self.ended = queue.add(lambda: self._may_end.wait(60), tenant)

    def release(self) -> None:
        self._may_end.set()


async def test_calls_beyond_a_bound_are_refused_until_there_is_room(queue: CallQueue) -> None:
    stall = Stall(queue, "a")
    calls = [asyncio.create_task(queue.call(lambda: 1, tenant)) for tenant in ("a", "b", "b")]
    await asyncio.sleep(0)
    assert len(queue) == 4
    with pytest.raises(StorageUnavailable, match="^4 in all$"):
        await queue.call(lambda: 1, "c")
    with pytest.raises(StorageUnavailable, match="^4 in all$"):
        queue.check()
    stall.release()
    assert await asyncio.gather(*calls) == [1, 1, 1]
    assert len(queue) == 0
    assert await queue.call(lambda: 2, "a") == 2


async def test_a_tenant_leaves_room_to_others(queue: CallQueue) -> None:
    stall = Stall(queue, "a")
    first = asyncio.create_task(queue.call(lambda: 1, "a"))
    await asyncio.sleep(0)
    with pytest.raises(StorageUnavailable, match="^2 of a tenant$"):
        await queue.call(lambda: 1, "a")
    others = [asyncio.create_task(queue.call(lambda: 1, tenant)) for tenant in ("b", "")]
    stall.release()
    assert await asyncio.gather(first, *others) == [1, 1, 1]


async def test_what_must_not_be_lost_is_added_to_a_full_queue(queue: CallQueue) -> None:
    stall, order = Stall(queue), list[int]()
    added = [queue.add(lambda number=number: order.append(number)) for number in range(9)]  # type: ignore[misc]
    assert len(queue) == 10
    stall.release()
    for one in added:
        await asyncio.wrap_future(one)
    assert order == list(range(9))


async def test_a_caller_that_leaves_makes_no_call_and_keeps_its_place(queue: CallQueue) -> None:
    """Its place is in the thread's queue, and takes memory, until its turn comes."""
    stall, made = Stall(queue), list[int]()
    calls = [asyncio.create_task(queue.call(lambda: made.append(1))) for _ in range(3)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    with pytest.raises(StorageUnavailable):
        queue.check()
    stall.release()
    await asyncio.wrap_future(queue.add(lambda: None))
    assert made == [] and len(queue) == 0


async def test_errors_pass_and_a_closed_queue_takes_nothing(queue: CallQueue) -> None:
    with pytest.raises(ZeroDivisionError):
        await queue.call(lambda: 1 // 0)
    queue.close(wait=True)
    with pytest.raises(RuntimeError):
        queue.add(lambda: None)
    assert len(queue) == 0
