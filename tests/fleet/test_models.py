"""The models of an agent: what is placed and unloaded at the same time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.blobs import retry
from pipeline.catalog import pulled
from pipeline.catalog.entry import Entry
from pipeline.config.load import resolve
from pipeline.errors import Conflict, ModelNotFound, ResourceError, StarlingError, StorageUnavailable
from pipeline.fleet.bodies import LoadModelRequest
from stages.agent import state_file
from stages.agent.models import Models
from stages.agent.placement import Placement
from stages.agent.restoration import MAX_MODELS, is_for_now
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


async def test_other_models_do_not_wait_for_the_disk_of_an_unload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own answer does, and the removal of its files: a successor must not load what is said to be unloaded."""
    begun, may_end = threading.Event(), threading.Event()
    write = state_file.write_stored
    removed: list[tuple[str, ...]] = []

    def write_late(agent_dir: Path, stored: Stored) -> None:
        begun.set()
        assert may_end.wait(60)
        write(agent_dir, stored)

    def remove(digest: str) -> bool:
        removed.append(tuple(sorted(stored_in(tmp_path))))
        return True

    models = made(tmp_path, monkeypatch)
    monkeypatch.setattr(models.cache, "remove", remove)
    await models.place(LoadModelRequest(model_id="m"))
    monkeypatch.setattr(state_file, "write_stored", write_late)
    unloading = asyncio.create_task(models.unload("m", drop_cached=True))
    await until(begun.is_set)
    placing = asyncio.create_task(models.place(LoadModelRequest(model_id="n")))
    stopping = asyncio.create_task(models.unload("o", drop_cached=False))
    try:
        await until(lambda: [one.model_id for one in models.placed] == ["n"])
        assert not any(one.done() for one in (unloading, placing, stopping))
        assert stored_in(tmp_path) == {"m"} and removed == []
    finally:
        may_end.set()
    with pytest.raises(Conflict, match="are those of a loaded model"):  # all models of this test have the same files
        await unloading
    await asyncio.gather(placing, stopping)
    assert stored_in(tmp_path) == {"n"}
    await models.unload("n", drop_cached=True)
    assert removed == [()]
    await models.stop()


class Refusing:
    """The catalog and the pauses of a restoration: names are refused with their error until it is taken back."""

    def __init__(self, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[str, StarlingError] = {}
        self.asked: list[str] = []
        self.held: dict[str, asyncio.Event] = {}  # names whose question is not answered yet
        self.pauses: list[float] = []
        self.may_ask_again = asyncio.Event()
        find = models._find

        async def refusing(name: str) -> Any:
            self.asked.append(name)
            if name in self.held:
                await self.held[name].wait()
            if name in self.errors:
                raise self.errors[name]
            return await find(name)

        async def pause(seconds: float) -> None:
            self.pauses.append(seconds)
            await asyncio.sleep(0)
            await self.may_ask_again.wait()

        monkeypatch.setattr(models, "_find", refusing)
        monkeypatch.setattr(models._restoration, "_sleep", pause)


def stored_in(folder: Path) -> set[str]:
    found = read_stored(folder / "agent.json")
    assert found is not None
    return set(found.models)


AWAY = StorageUnavailable("the store does not answer")


async def test_an_agent_that_is_killed_while_it_restores_models_forgets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = made(tmp_path, monkeypatch, ("m", "n", "n:a"))
    catalog = Refusing(models, monkeypatch)
    catalog.held["n"] = asyncio.Event()
    restoring = asyncio.create_task(models.restore())
    await until(lambda: catalog.asked == ["m", "n"])
    await models.place(LoadModelRequest(model_id="other"))
    assert stored_in(tmp_path) == {"m", "n", "n:a", "other"}
    restoring.cancel()
    await asyncio.wait([restoring])
    await models.stop()
    assert stored_in(tmp_path) == {"m", "n", "n:a", "other"}


async def test_a_model_that_is_refused_for_now_is_restored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = made(tmp_path, monkeypatch, ("m", "n", "o"))
    catalog = Refusing(models, monkeypatch)
    catalog.errors = {"m": AWAY, "n": ModelNotFound("it is not published any more")}
    restoring = asyncio.create_task(models.restore())
    await until(lambda: len(catalog.pauses) == 1 and len(catalog.asked) == 3)
    await models.place(LoadModelRequest(model_id="other"))
    assert stored_in(tmp_path) == {"m", "o", "other"}  # `n` was refused for good
    del catalog.errors["m"]
    catalog.may_ask_again.set()
    await restoring
    assert catalog.asked == ["m", "n", "o", "other", "m"]
    assert {one.model_id for one in models.placed} == {"m", "o", "other"}
    await models.stop()
    assert stored_in(tmp_path) == {"m", "o", "other"}


async def test_pauses_of_a_restoration_grow_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = made(tmp_path, monkeypatch, ("m",))
    catalog = Refusing(models, monkeypatch)
    catalog.errors["m"] = AWAY
    catalog.may_ask_again.set()
    models._restoration._jitter = lambda: 0.5
    restoring = asyncio.create_task(models.restore())
    await until(lambda: len(catalog.pauses) > 9)
    assert catalog.pauses[:3] == [0.25, 0.5, 1.0] and max(catalog.pauses) == retry.MOST_S
    restoring.cancel()
    await asyncio.wait([restoring])
    await models.stop()


@pytest.mark.parametrize("unloaded", ["m", "m:a"])
async def test_a_model_that_is_unloaded_is_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unloaded: str
) -> None:
    """Whether it is asked for just then (`m`), or waits for its turn (`m:a`)."""
    models = made(tmp_path, monkeypatch, ("m", "m:a", "n"))
    catalog = Refusing(models, monkeypatch)
    catalog.held = {"m": asyncio.Event(), "n": asyncio.Event()}
    restoring = asyncio.create_task(models.restore())
    await until(lambda: catalog.asked == ["m"])
    await models.unload(unloaded, drop_cached=False)
    assert stored_in(tmp_path) == ({"n"} if unloaded == "m" else {"m", "n"})
    catalog.held["m"].set()
    await until(lambda: "n" in catalog.asked)
    assert [one.model_id for one in models.placed] == ([] if unloaded == "m" else ["m"])
    assert models.adapters.names == ()
    catalog.held["n"].set()
    await restoring
    await models.stop()


async def test_what_was_loaded_meanwhile_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fleet.agent.max_models` others: a model of the last run does not wait for the end of one."""
    models = made(tmp_path, monkeypatch, ("m",))
    catalog = Refusing(models, monkeypatch)
    catalog.held["m"] = asyncio.Event()
    restoring = asyncio.create_task(models.restore())
    await until(lambda: catalog.asked == ["m"])
    for number in range(models._config.fleet.agent.max_models):
        await models.place(LoadModelRequest(model_id=f"other{number}"))
    catalog.held["m"].set()
    await restoring
    assert catalog.pauses == []
    await models.stop()
    assert "m" not in stored_in(tmp_path)


def test_which_refusals_are_for_now() -> None:
    assert is_for_now(AWAY) and is_for_now(ResourceError("no memory", "model_id"))
    for error in (ResourceError("full", MAX_MODELS), ModelNotFound("gone"), Conflict("another one")):
        assert not is_for_now(error)
