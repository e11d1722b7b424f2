"""When an engine gets requests while its model is still downloaded, by the speed of the download."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.load import resolve
from pipeline.errors import StorageUnavailable
from stages.agent import placement as placements
from stages.agent.downloads.model import PHASE
from stages.agent.engines.interface import EngineDied, Queue
from stages.agent.heartbeat import Reporter
from stages.agent.placement import ADMIT_S, WITHDRAW_S, Placement
from stages.agent.state_file import Stored
from tests.fleet.coordination_stores import LIMIT_S, until
from tests.fleet.test_engines import ENTRY, Busy

TOTAL = 1000


class Switched(Busy):
    """An engine that notes whether it takes requests."""

    is_suspended = False
    key = "secret"

    def __init__(self) -> None:
        super().__init__()
        self.death: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()

        self.calls: list[str] = []
        self.may_start, self.may_answer, self.may_suspend, self.may_resume = (asyncio.Event() for _ in range(4))
        for one in (self.may_start, self.may_answer, self.may_suspend, self.may_resume):
            one.set()

    async def start(self) -> None:
        self.calls.append("start")
        await super().start()
        await self.may_start.wait()

    async def ready(self) -> None:
        await self.may_answer.wait()

    async def ended(self) -> EngineDied:
        return await asyncio.shield(self.death)

    async def suspend(self) -> None:
        self.is_suspended = True
        self.calls.append("suspend")
        await self.may_suspend.wait()

    async def resume(self) -> None:
        self.calls.append("resume")
        await self.may_resume.wait()
        self.is_suspended = False


def reporter() -> Reporter:
    """What an agent says of its models."""
    models: Any = SimpleNamespace(other_engines={})
    lease: Any = None
    return Reporter(resolve({}, {}), Stored(agent_id="a", incarnation="b"), models, lease)


class Slow:
    """A download whose bytes arrive as the test says, and the placement that waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = Switched()
        self.is_open = True
        self.has_ended = False  # the download
        self.released: list[tuple[str, bool, int]] = []  # state of the model, `has_ended`, how often the engine ended
        self.end = asyncio.get_running_loop().create_future()
        self.placement = Placement(
            ENTRY,
            self._bring,
            lambda entry, arriving: self.engine,
            lambda: self.is_open,
            release=self._release,
            clock=lambda: self.now,
        )

    def _release(self) -> None:
        self.released.append((self.placement.state, self.has_ended, self.engine.stops))

    async def _bring(self, placement: Placement) -> None:
        placement.note_arriving(Path("arriving"))
        try:
            await self.end
        finally:
            await asyncio.sleep(0)  # its files are closed
            self.has_ended = True

    def arrive(self, seconds: float, done: int) -> None:
        self.now += seconds
        self.placement.note_progress(PHASE, done, TOTAL)

    async def until(self, state: str) -> None:
        await until(lambda: self.placement.state == state)

    async def polls(self) -> None:
        """Let the placement look several times."""
        for _ in range(5):
            await asyncio.sleep(2 * placements.ADMIT_POLL_S)


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Slow]:
    monkeypatch.setattr(placements, "ADMIT_POLL_S", 0.001)
    slow = Slow()
    yield slow
    await slow.placement.stop()


async def test_a_model_is_ready_when_its_rest_is_near(slow: Slow) -> None:
    slow.arrive(0, 0)
    slow.arrive(1, 10)  # 99 s remain
    await slow.polls()
    assert slow.placement.state == "DOWNLOADING"
    slow.arrive(0.1, TOTAL - int(10 * ADMIT_S))  # 0.5 s remain
    await slow.until("READY")
    assert slow.placement.is_arriving
    slow.end.set_result(None)
    await until(lambda: not slow.placement.is_arriving)
    assert slow.placement.state == "READY"


async def test_a_model_whose_download_stops_gets_no_more_requests(slow: Slow) -> None:
    slow.arrive(0, 0)
    slow.arrive(1, 500)
    await slow.until("READY")
    slow.now += WITHDRAW_S - 1  # nothing comes
    await slow.polls()
    assert slow.placement.state == "READY"
    slow.now += 2
    await slow.until("DOWNLOADING")
    # Its engine has requests, and runs: it can be reached, and is measured and closed like any other.
    shown = reporter().loaded(slow.placement)
    assert (shown.model_state, shown.engine_url, shown.engine_key) == ("DOWNLOADING", "http://nowhere", "secret")
    assert (shown.inference_endpoint_url, shown.engine_incarnation) == ("", "")
    slow.engine.has = Queue(waiting=1)
    await slow.placement.measure()
    assert slow.placement.queue.waiting == 1
    slow.is_open = False
    await slow.placement.close()
    assert slow.engine.is_suspended
    slow.is_open = True
    await slow.placement.open()
    assert not slow.engine.is_suspended
    slow.arrive(0, TOTAL - 1)
    await slow.until("READY")
    assert reporter().loaded(slow.placement).inference_endpoint_url == "http://nowhere/v1/chat/completions"
    assert (slow.placement.incarnation, slow.placement.restarts, slow.engine.stops) == (1, 0, 0)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_withdrawn_model_follows_the_end_of_its_download(slow: Slow, is_lost: bool) -> None:
    slow.arrive(0, 0)
    slow.arrive(1, 500)
    await slow.until("READY")
    slow.now += 2 * WITHDRAW_S
    await slow.until("DOWNLOADING")
    if is_lost:
        slow.end.set_exception(StorageUnavailable("the store has ended"))
        await slow.until("FAILED")
        assert slow.engine.stops == 1
        shown = reporter().loaded(slow.placement)
        assert (shown.engine_url, shown.engine_key) == ("", "")
    else:
        slow.end.set_result(None)
        await slow.until("READY")
        assert slow.placement.progress is None


@pytest.mark.parametrize("at", ["start", "suspend"])
async def test_a_download_that_fails_while_its_engine_is_called_fails_the_model(at: str) -> None:
    """At once: an engine without its weights does not become ready, and nothing restarts it."""
    slow = Slow()
    answer = slow.engine.may_start if at == "start" else slow.engine.may_suspend
    answer.clear()
    slow.is_open = at == "start"
    if at == "start":
        slow.engine.may_answer.clear()
    slow.arrive(0, 0)
    slow.arrive(1, 500)
    await until(lambda: slow.engine.calls[-1:] == [at])
    slow.end.set_exception(StorageUnavailable("the store has ended"))
    await until(lambda: slow.has_ended)
    answer.set()
    try:
        with pytest.raises(StorageUnavailable, match="the store has ended"):
            await asyncio.wait_for(slow.placement.wait(), LIMIT_S)
        assert (slow.placement.state, slow.engine.stops, slow.placement.restarts) == ("FAILED", 1, 0)
    finally:
        await slow.placement.stop()


async def test_a_lease_that_ends_while_a_started_engine_is_resumed_suspends_it() -> None:
    slow = Slow()
    engine = slow.engine
    slow.is_open = False
    engine.may_suspend.clear()
    engine.may_resume.clear()
    slow.end.set_result(None)
    await until(lambda: engine.calls[-1:] == ["suspend"])
    slow.is_open = True
    engine.may_suspend.set()
    await until(lambda: engine.calls[-1:] == ["resume"])
    slow.is_open = False
    closing = asyncio.create_task(slow.placement.close())
    try:
        await asyncio.sleep(0)  # its call has begun
        engine.may_resume.set()
        await closing
        assert engine.is_suspended
        assert engine.calls == ["start", "suspend", "resume", "suspend"]
    finally:
        await slow.placement.stop()


@pytest.mark.parametrize("how", ["engine", "download", "unloaded"])
async def test_what_is_shown_is_released_at_any_end(slow: Slow, how: str) -> None:
    """When neither engine nor download uses it, and before the model can be placed again."""
    slow.arrive(0, 0)
    slow.arrive(1, 500)
    await slow.until("READY")
    if how == "engine":
        slow.engine.death.set_result(EngineDied("it cannot run here", True))
    elif how == "download":
        slow.end.set_exception(StorageUnavailable("the store has ended"))
    else:
        await slow.placement.stop()
    await slow.until("UNLOADED" if how == "unloaded" else "FAILED")
    ((state, has_ended, stops),) = slow.released
    assert (state in ("FAILED", "UNLOADED"), has_ended, stops) == (False, True, 1)
