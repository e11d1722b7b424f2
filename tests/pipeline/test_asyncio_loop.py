"""Edges in an asyncio loop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import Config, ModelConfig, ServerConfig
from pipeline.ipc.asyncio_loop import AsyncioLoop
from pipeline.protocol import messages as m


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        models=(ModelConfig(name="m"),),
        server=ServerConfig(
            run_dir=str(tmp_path / "run"),
            arena_dir=str(tmp_path / "shm"),
            heartbeat_ms=20,
            drain_timeout_ms=100,
        ),
    )


async def test_frames_and_failing_handlers(config: Config) -> None:
    gateway, scheduler = AsyncioLoop("gateway", config), AsyncioLoop("scheduler", config)
    got: asyncio.Queue[m.Frame] = asyncio.Queue()
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))

    def on_frame(peer: bytes, frame: m.Frame) -> None:
        if isinstance(frame, m.Cancel):
            raise RuntimeError("broken")
        hub.send(peer, m.Rejected("s", "OVERLOADED", "full"))

    hub = scheduler.bind("gateway-scheduler", on_frame)
    link = gateway.connect("gateway-scheduler", got.put_nowait)
    up = asyncio.Event()
    link.on_up = lambda hello: up.set()
    for endpoints in (gateway, scheduler):
        endpoints.start(signals=False)
    async with asyncio.timeout(60):
        await up.wait()
        assert link.send(m.Cancel("s"))
        assert link.send(m.Submit("s/0", "s", "m", "t", b"", 1, m.Sampling()))
        assert await got.get() == m.Rejected("s", "OVERLOADED", "full")
    assert len(failures) == 1
    assert "gateway-scheduler" in failures[0]["message"]
    gateway.close()
    scheduler.close()
    scheduler.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_signal_stops_it(config: Config, busy: bool) -> None:
    gateway = AsyncioLoop("gateway", config)
    gateway.start()
    gateway.busy = busy
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await gateway.stopped() == 0
    assert gateway.stopping
    gateway.close()


async def test_a_signal_is_not_left_to_a_tick_that_is_far_away(config: Config) -> None:
    gateway = AsyncioLoop("gateway", config)
    ticked = asyncio.Event()
    gateway.on_tick.append(ticked.set)
    gateway.start()
    async with asyncio.timeout(20):
        await ticked.wait()
        gateway._next_tick = gateway.clock() + 1000
        gateway._set_timer()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await gateway.stopped() == 0
    gateway.close()


async def test_quit_carries_the_code(config: Config) -> None:
    gateway = AsyncioLoop("gateway", config)
    gateway.start()
    gateway.quit(3)
    assert await gateway.stopped() == 3
    gateway.close()


async def test_there_is_one_timer_however_often_frames_bring_a_tick_about(config: Config) -> None:
    gateway = AsyncioLoop("gateway", config)

    def timers() -> int:
        scheduled: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        return sum(timer._callback == gateway._tick_now and not timer.cancelled() for timer in scheduled)  # type: ignore[attr-defined]

    ticked = asyncio.Event()
    gateway.on_tick.append(ticked.set)
    gateway.start(signals=False)
    async with asyncio.timeout(60):
        await ticked.wait()
        for _ in range(5):
            ticked.clear()
            gateway._next_tick = 0.0
            gateway._after_frames()
            assert ticked.is_set()
            assert timers() == 1
        # At rest the next one is far away, until something has come.
        gateway._next_tick = gateway.clock() + 1000
        gateway._set_timer()
        ticked.clear()
        gateway.mark_active()
        assert timers() == 1
        await ticked.wait()
    gateway.close()
    assert timers() == 0


async def test_a_tick_that_is_asked_for_comes_soon_and_once(config: Config) -> None:
    gateway = AsyncioLoop("gateway", config)
    ticks: list[bool] = []
    ticked = asyncio.Event()
    gateway.on_tick += [lambda: ticks.append(True), ticked.set]
    gateway.start(signals=False)
    async with asyncio.timeout(60):
        await ticked.wait()
        ticked.clear()
        gateway._next_tick = gateway.clock() + 1000
        gateway._set_timer()
        for _ in range(3):
            gateway.tick_soon()
        await ticked.wait()
        await asyncio.sleep(0)
    assert len(ticks) == 2
    gateway.close()
    gateway.tick_soon()
    assert gateway._timer is None
