"""The models of an agent: what is placed and unloaded at the same time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.catalog import pulled
from pipeline.catalog.entry import Entry
from pipeline.config.load import resolve
from pipeline.fleet.bodies import LoadModelRequest
from stages.agent import state_file
from stages.agent.models import Models
from stages.agent.placement import Placement
from stages.agent.state_file import Stored, read_stored
from tests.fleet.coordination_stores import until
from tests.fleet.test_engines import ENTRY


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, stored: tuple[str, ...] = ()) -> Models:
    """Models that are published, fit, and do not arrive. `stored`: of the agent before."""
    none: Any = None
    before = Stored(agent_id="a", incarnation="b", models=stored)
    models = Models(resolve({}, {}), folder, folder / "models", before, [], none, none, lambda: True)

    async def find(name: str) -> Entry:
        return msgspec.structs.replace(ENTRY, name=name)

    async def make_memory(*arguments: object) -> None:
        return

    async def bring(placement: Placement) -> None:
        await asyncio.Event().wait()

    for name, method in (("_find", find), ("make_memory", make_memory), ("_bring", bring)):
        monkeypatch.setattr(models, name, method)
    return models


async def test_a_model_is_brought_after_its_files_have_been_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = made(tmp_path, monkeypatch)
    order: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def remove(digest: str) -> bool:
        order.append("removal")
        begun.set()
        assert may_end.wait(60)
        order.append("removed")
        return True

    async def bring(placement: Placement) -> None:
        order.append("brought")
        await asyncio.Event().wait()

    monkeypatch.setattr(pulled, "read", lambda folder, name: SimpleNamespace(entry=ENTRY))
    monkeypatch.setattr(models.cache, "remove", remove)
    monkeypatch.setattr(models, "_bring", bring)
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


async def test_requests_that_change_models_leave_the_event_loop_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While agent.json is written: the lease is renewed there, and a lease that ends ends all streams."""
    begun, may_end = threading.Event(), threading.Event()
    write = state_file.write_stored

    def write_late(agent_dir: Path, stored: Stored) -> None:
        begun.set()
        assert may_end.wait(30)
        write(agent_dir, stored)

    monkeypatch.setattr(state_file, "write_stored", write_late)
    models = made(tmp_path, monkeypatch)
    for change, left in (
        (models.place(LoadModelRequest(model_id="m")), ("m",)),
        (models.adapters.on_changed(), ("m",)),
        (models.unload("m", drop_cached=False), ()),
    ):
        changing = asyncio.ensure_future(change)
        await until(begun.is_set)
        assert not changing.done()
        may_end.set()
        await changing
        stored = read_stored(tmp_path / "agent.json")
        assert stored is not None and stored.models == left
        begun.clear()
        may_end.clear()
    may_end.set()
    await models.stop()
