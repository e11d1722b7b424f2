"""The models of an agent: what is placed and unloaded at the same time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.catalog import pulled
from pipeline.catalog.entry import Entry
from pipeline.config.load import resolve
from pipeline.fleet.bodies import LoadModelRequest
from stages.agent.models import Models, Stored
from stages.agent.placement import Placement
from tests.fleet.coordination_stores import until
from tests.fleet.test_engines import ENTRY


async def test_a_model_is_brought_after_its_files_have_been_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: Any = None
    stored = Stored(agent_id="a", incarnation="b")
    models = Models(resolve({}, {}), tmp_path, tmp_path / "models", stored, [], none, none, lambda: True)
    order: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def remove(digest: str) -> bool:
        order.append("removal")
        begun.set()
        assert may_end.wait(60)
        order.append("removed")
        return True

    async def find(name: str) -> Entry:
        return ENTRY

    async def make_memory(*arguments: object) -> None:
        return

    async def bring(placement: Placement) -> None:
        order.append("brought")
        await asyncio.Event().wait()

    monkeypatch.setattr(pulled, "read", lambda folder, name: SimpleNamespace(entry=ENTRY))
    monkeypatch.setattr(models.cache, "remove", remove)
    for name, made in (("_find", find), ("make_memory", make_memory), ("_bring", bring)):
        monkeypatch.setattr(models, name, made)
    unloading = asyncio.create_task(models.unload("m", drop_cached=True))
    await until(begun.is_set)
    placing = asyncio.create_task(models.place(LoadModelRequest(model_id="m")))
    for _ in range(30):
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(unloading, placing)
    await until(lambda: "brought" in order)
    assert order == ["removal", "removed", "brought"]
    await models.stop()
