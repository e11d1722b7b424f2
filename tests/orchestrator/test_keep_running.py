"""The parts of an orchestrator that have no end go on after an error that they do not expect."""

from __future__ import annotations

import asyncio
import logging

import pytest

from stages.orchestrator.keep_running import keep_running


async def test_an_unexpected_error_is_logged_and_the_work_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    begun, paused = list[int](), list[float]()

    async def follow() -> None:
        begun.append(len(begun))
        if len(begun) == 1:
            raise RuntimeError("a value that was not foreseen")
        await asyncio.Event().wait()

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    with caplog.at_level(logging.ERROR):
        task = asyncio.ensure_future(keep_running(follow, sleep))
        while len(begun) < 2:
            await asyncio.sleep(0)
    assert len(paused) == 1
    (record,) = [one for one in caplog.records if one.name == "starling.orchestrator"]
    assert record.exc_info is not None and "not foreseen" in str(record.exc_info[1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_part_that_has_nothing_to_do_returns() -> None:
    async def run() -> None:
        return

    async def sleep(seconds: float) -> None:
        raise AssertionError("it would be asked again and again")

    await keep_running(run, sleep)
