"""What an agent answers to heartbeats: as of the last look at its files, unless they have changed since."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.load import resolve
from pipeline.fleet.bodies import CachedModel
from stages.agent.heartbeat import Reporter
from stages.agent.state_file import Stored
from tests.fleet.coordination_stores import until


async def test_files_that_change_during_a_look_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    models: Any = SimpleNamespace(
        placed=[],
        other_engines={},
        download_rate=0.0,
        disk_error="",
        takes_signed_urls=False,
        wanted_urls=lambda: (),
        kernels=SimpleNamespace(progress=None),
    )
    lease: Any = SimpleNamespace(remaining_s=1.0, is_name_taken=False, is_late=False, is_valid=True)
    reporter = Reporter(resolve({}, {}), Stored(agent_id="a", incarnation="b"), models, lease, lambda: 0.0)
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
