"""What an agent answers to heartbeats: as of the last look at its files, unless they have changed since."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.fleet.bodies import CachedModel, HeartbeatResponse
from stages.agent.engines.interface import Engine, Queue
from stages.agent.gpus import GpuUse
from stages.agent.heartbeat import SILENT_S, Reporter
from stages.agent.look import Look
from stages.agent.placement import Placement
from stages.agent.state_file import Stored
from tests.fleet.coordination_stores import until
from tests.fleet.test_engines import ENTRY, Busy


def reporter_of(
    placed: list[Placement],
    clock: Callable[[], float],
    patience_s: float,
    gpus: Callable[[], GpuUse | None] = lambda: None,
) -> Reporter:
    """Of an agent with a lease."""
    models: Any = SimpleNamespace(
        placed=placed,
        other_engines={},
        download_rate=0.0,
        disk_error="",
        takes_signed_urls=False,
        wanted_urls=lambda: (),
        kernels=SimpleNamespace(progress=None),
        cache=SimpleNamespace(models_dir=Path("/models")),
    )
    lease: Any = SimpleNamespace(remaining_s=1.0, is_name_taken=False, is_late=False, is_valid=True)
    stored = Stored(agent_id="a", incarnation="b")
    return Reporter(resolve({}, {}), stored, models, lease, clock, patience_s=patience_s, gpus=gpus)


async def test_files_that_change_during_a_look_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = reporter_of([], lambda: 0.0, patience_s=60)
    looks = 0
    begun, may_end = threading.Event(), threading.Event()

    def look() -> tuple[tuple[CachedModel, ...], int, str]:
        nonlocal looks
        looks += 1
        begun.set()
        assert may_end.wait(60)
        return (), looks, ""

    monkeypatch.setattr(reporter, "_look", look)
    reporting = asyncio.create_task(reporter.report())
    await until(begun.is_set)
    reporter.files_changed()
    may_end.set()
    assert (await reporting).disk_free == 1
    assert [(await reporter.report()).disk_free for _ in range(2)] == [2, 2]


class Silent(Busy):
    """An engine that answers how long its queue is when the test says so."""

    def __init__(self, running: int) -> None:
        super().__init__()
        self.has = Queue(running=running)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = 0

    async def queue(self) -> Queue:
        self.asked += 1
        await self.may_answer.wait()
        return self.has


async def placed(name: str, engine: Engine) -> Placement:
    """A model with this engine, ready."""

    async def bring(placement: Placement) -> None:
        return

    found = Placement(msgspec.structs.replace(ENTRY, name=name), bring, lambda entry, arriving: engine, lambda: True)
    await found.wait()
    return found


async def test_a_silent_engine_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are reported as ever. What is known of its queue is old, and is called so."""
    now, slow, fast = 0.0, Silent(1), Silent(2)
    models = [await placed("slow", slow), await placed("fast", fast)]
    reporter = reporter_of(models, lambda: now, patience_s=0.2)
    monkeypatch.setattr(reporter, "_look", lambda: ((), 5, ""))

    async def report() -> dict[str, tuple[int, float]]:
        answer = await asyncio.wait_for(reporter.report(), 60)
        assert (answer.state == "DEGRADED") == bool(answer.reasons)
        return {one.model_id: (one.running, one.silent_s) for one in answer.loaded_models}

    assert await report() == {"slow": (1, 0.0), "fast": (2, 0.0)}
    slow.may_answer.clear()
    slow.has, fast.has = Queue(running=3), Queue(running=4)
    now = 1.0
    assert await report() == {"slow": (1, 0.0), "fast": (4, 0.0)} and reporter.reasons() == []
    now = 1.0 + SILENT_S + 1
    assert await report() == {"slow": (1, 4.0), "fast": (4, 0.0)}
    assert slow.asked == 2  # one question at a time
    (reason,) = reporter.reasons()
    assert "'slow' has not answered for 4 s" in reason
    slow.may_answer.set()
    await until(lambda: not reporter.reasons())
    assert (await report())["slow"] == (3, 0.0)
    for one in models:
        await one.stop()


async def test_a_silent_disk_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded there meanwhile: what is reported of its files is old, and it has no room."""
    now, may_end = 0.0, threading.Event()
    may_end.set()
    reporter = reporter_of([], lambda: now, patience_s=0.2)

    def look() -> tuple[tuple[CachedModel, ...], int, str]:
        assert may_end.wait(60)
        return (), 5, ""

    async def report() -> HeartbeatResponse:
        return await asyncio.wait_for(reporter.report(), 50)

    monkeypatch.setattr(reporter, "_look", look)
    await until_async(report, lambda answer: answer.disk_free == 5)
    may_end.clear()
    try:
        now = 6.0
        answer = await report()
        assert (answer.disk_free, answer.files_silent_s, answer.state) == (5, 0.0, "IDLE")
        now = 6.0 + SILENT_S + 1
        answer = await report()
        assert (answer.disk_free, answer.files_silent_s, answer.state) == (0, 4.0, "DEGRADED")
        assert "the disk of /models has not answered for 4 s" in answer.reasons[0]
    finally:
        may_end.set()
    answer = await until_async(report, lambda answer: answer.state == "IDLE")
    assert (answer.disk_free, answer.files_silent_s) == (5, 0.0)


async def until_async(
    report: Callable[[], Awaitable[HeartbeatResponse]], holds: Callable[[HeartbeatResponse], bool]
) -> HeartbeatResponse:
    """The first report that holds."""
    async with asyncio.timeout(60):
        while not holds(answer := await report()):
            await asyncio.sleep(0.01)
    return answer


async def test_the_first_heartbeat_waits_for_engines_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Silent(1)
    engine.may_answer.clear()
    model = await placed("m", engine)
    reporter = reporter_of([model], lambda: 0.0, patience_s=60)
    monkeypatch.setattr(reporter, "_look", lambda: ((), 5, ""))
    reporting = asyncio.create_task(reporter.report())
    await until(lambda: engine.asked == 1)
    assert not reporting.done()
    engine.may_answer.set()
    answer = await reporting
    assert answer.disk_free == 5 and answer.loaded_models[0].running == 1
    await model.stop()


async def test_a_look_that_fails_is_one_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    now, error = 0.0, OSError("input/output error")

    async def ask() -> None:
        if now < 2:
            raise error

    look = Look(ask, 0.5, lambda: now, patience_s=60)
    await look.refresh()
    now = 1.0
    await look.refresh()
    assert look.silent_s == 1.0 and "input/output error" in caplog.text
    now = 2.0
    await look.refresh()
    assert look.silent_s == 0.0
