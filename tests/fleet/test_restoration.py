"""For how long an agent asks for the models of its last run, and what they may take: memory that is free, once."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import cgroup, procfs
from pipeline.catalog import adapters as published
from pipeline.catalog.adapter_entry import AdapterEntry
from pipeline.catalog.entry import Entry
from pipeline.errors import ModelNotFound, NotOnThisHost, ResourceError, StorageUnavailable
from pipeline.fleet.bodies import LoadModelRequest
from stages.agent.downloads.signed_store import SignedModels
from stages.agent.models import Models
from stages.agent.restoration import ROOM_S, is_for_now
from tests.fleet.coordination_stores import until
from tests.fleet.test_agent_adapters import entry
from tests.fleet.test_engines import ENTRY
from tests.fleet.test_models import AWAY, Refusing, made, stored_in

NONE: Any = None


class Host:
    """Memory, standby engines, pauses and the clock of an agent whose models are `m` and others."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, stored: tuple[str, ...]) -> None:
        models = self.models = made(folder, monkeypatch, stored)
        self.catalog = Refusing(models, monkeypatch)
        self.kv = models._config.kv_cache_bytes(models.settings("m"))
        self.total = 100 * self.kv
        self.free = 0
        self.given_up: list[str] = []
        self.has_standby = False  # whose memory is that of a model
        self.now = 1000.0
        monkeypatch.setattr(models, "make_memory", partial(Models.make_memory, models))
        monkeypatch.setattr(procfs, "total_memory", lambda: self.total)
        monkeypatch.setattr(procfs, "available_memory", lambda: self.free)
        monkeypatch.setattr(cgroup, "read", lambda: cgroup.Limits(None, None, None))
        monkeypatch.setattr(models.standby, "give_up", self._give_up)
        monkeypatch.setattr(models._restoration, "_clock", lambda: self.now)

    async def _give_up(self, reason: str, pause_s: float = 0.0) -> bool:
        self.given_up.append(reason)
        if not self.has_standby:
            return False
        self.has_standby, self.free = False, self.free + self.kv
        return True

    async def attempts(self, count: int) -> None:
        """Wait until there have been so many that were refused for now."""
        await until(lambda: len(self.catalog.pauses) >= count)

    async def stop(self, restoring: asyncio.Task[None]) -> None:
        restoring.cancel()
        await asyncio.wait([restoring])
        await self.models.stop()


def wanted(host: Host) -> tuple[str, ...]:
    return host.models._restoration.names


async def restored(host: Host) -> None:
    """Nothing is to be asked for again."""
    restoring = asyncio.create_task(host.models.restore())
    await until(restoring.done)


async def test_standby_engines_are_ended_for_a_model_of_the_last_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, monkeypatch, ("m",))
    host.catalog.errors["m"] = AWAY
    host.has_standby, host.free = True, -host.kv
    restoring = asyncio.create_task(host.models.restore())
    await host.attempts(1)
    del host.catalog.errors["m"]  # the first refusal was not for want of memory
    host.catalog.may_ask_again.set()
    await host.attempts(5)
    assert host.given_up == ["m needs the memory"] and not host.has_standby
    host.has_standby = True  # they are started again, and stay
    await host.attempts(8)
    assert host.given_up == ["m needs the memory"] and host.models.placed == []
    host.free = host.kv
    await until(restoring.done)
    assert [one.model_id for one in host.models.placed] == ["m"] and host.has_standby
    await host.stop(restoring)


async def test_standby_engines_that_start_while_a_model_waits_for_memory_are_ended_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when processes of the last run still held the memory at the first attempt, before there were any."""
    host = Host(tmp_path, monkeypatch, ("m",))
    host.catalog.may_ask_again.set()
    restoring = asyncio.create_task(host.models.restore())
    await host.attempts(3)
    assert host.models.placed == []
    host.has_standby = True  # the others' memory is free, and has gone to them
    await until(restoring.done)
    assert [one.model_id for one in host.models.placed] == ["m"] and not host.has_standby
    await host.stop(restoring)


async def test_a_model_of_the_last_run_comes_before_standby_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, monkeypatch, ("m",))
    host.has_standby = True
    await restored(host)
    assert [one.model_id for one in host.models.placed] == ["m"] and not host.has_standby
    await host.models.stop()


async def test_memory_is_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(tmp_path, monkeypatch, ("m", "n"))
    host.catalog.errors["n"] = AWAY
    host.catalog.may_ask_again.set()
    host.models._restoration._jitter = lambda: 0.5
    restoring = asyncio.create_task(host.models.restore())
    await host.attempts(1)
    host.now += ROOM_S - 0.125
    asked = host.catalog.asked.count("m")
    await until(lambda: host.catalog.asked.count("m") > asked + 1)
    assert 0.125 in host.catalog.pauses, "the last attempt is not later"
    assert wanted(host) == ("m", "n")
    assert not [one for one in caplog.records if one.levelno == logging.ERROR]
    host.now += 0.125
    await until(lambda: wanted(host) == ("n",))
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert errors == ["a model of the last run is not loaded"]
    host.free = 100 * host.kv  # hours later a model has left
    asked = host.catalog.asked.count("n")
    await until(lambda: host.catalog.asked.count("n") > asked + 3)
    assert host.models.placed == []
    del host.catalog.errors["n"]  # a store is waited for without a bound
    await until(restoring.done)
    assert [one.model_id for one in host.models.placed] == ["n"]
    await host.stop(restoring)
    assert stored_in(tmp_path) == {"n"}


@pytest.mark.parametrize("name", ["m", "m:a"])
async def test_what_an_unload_frees_is_not_for_those_that_have_lacked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also if one of them is asked for while the unload runs, and waits for its end."""
    host = Host(tmp_path, monkeypatch, (name, "late"))
    serve_adapter(host, monkeypatch)
    host.free = host.kv
    await host.models.place(LoadModelRequest(model_id="other"))
    host.free = 0
    host.catalog.errors["late"] = AWAY
    restoring = asyncio.create_task(host.models.restore())
    await host.attempts(2)
    placement, may_stop, stopping = host.models._placed["other"], asyncio.Event(), asyncio.Event()
    stop = placement.stop

    async def slow_stop() -> None:
        stopping.set()
        await may_stop.wait()
        await stop()
        host.free = host.kv

    monkeypatch.setattr(placement, "stop", slow_stop)
    unloading = asyncio.create_task(host.models.unload("other", drop_cached=False))
    await stopping.wait()
    asked = host.catalog.asked.count("m")
    host.catalog.may_ask_again.set()
    await until(lambda: host.catalog.asked.count("m") > asked)
    may_stop.set()
    await unloading
    await until(lambda: stored_in(tmp_path) == {"late"})
    asked = host.catalog.asked.count("late")
    await until(lambda: host.catalog.asked.count("late") > asked + 3)
    assert host.models.placed == []
    await host.models.place(LoadModelRequest(model_id="next"))  # for which it was freed
    await host.stop(restoring)


def serve_adapter(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """`m:a` is published, and its file is here."""

    async def found(request: LoadModelRequest) -> AdapterEntry:
        return entry("a", 1)

    async def bring(*arguments: object) -> Path:
        return Path("/a")

    monkeypatch.setattr(host.models.adapters, "_entry_of", found)
    monkeypatch.setattr("stages.agent.adapters.bring_adapter", bring)


async def test_an_adapter_of_the_last_run_ends_standby_engines_once_unless_a_request_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, monkeypatch, ("m:a",))
    serve_adapter(host, monkeypatch)
    host.has_standby, host.free = True, -host.kv
    host.catalog.may_ask_again.set()
    restoring = asyncio.create_task(host.models.restore())
    await host.attempts(4)
    assert host.given_up == ["m needs the memory"]
    host.catalog.held["m"] = asyncio.Event()
    asked = len(host.catalog.asked)
    await until(lambda: len(host.catalog.asked) > asked)
    load = await host.models.adapters.load(LoadModelRequest(model_id="m:a"))
    assert load.terms.takes_standby and load.terms.is_wanted()
    await host.stop(restoring)


async def test_a_host_that_is_too_small_refuses_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, monkeypatch, ("m",))
    host.total = host.kv - 1
    await restored(host)
    assert host.catalog.pauses == [] and host.catalog.asked == ["m"]
    await host.models.stop()
    assert stored_in(tmp_path) == set()


@pytest.mark.parametrize(("rank", "nbytes"), [(65, 1), (4, 1 << 50)])
async def test_an_adapter_that_the_configuration_excludes_is_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, nbytes: int
) -> None:
    host = Host(tmp_path, monkeypatch, ("m:a",))
    asked: list[str] = []

    async def find(store: object, name: str) -> AdapterEntry:
        asked.append(name)
        return msgspec.structs.replace(entry("a", 1), rank=rank, bytes=nbytes)

    monkeypatch.setattr(published, "find", find)
    host.models.adapters._stores.append(NONE)
    await restored(host)
    assert host.catalog.pauses == [] and asked == ["m:a"]
    await host.models.stop()
    assert stored_in(tmp_path) == set()


@pytest.mark.parametrize("failure", [None, ModelNotFound("not in the mirror"), StorageUnavailable("no answer")])
async def test_what_only_an_orchestrator_can_bring_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    """`fleet.agent.signed_urls`: requests bring the URLs, and a restoration has none. A mirror may answer later."""
    models = made(tmp_path, monkeypatch)
    models._signed, models._reads_blobs = SignedModels([]), False

    async def find(store: object, name: str) -> Entry:
        if failure is not None:
            raise failure
        return ENTRY

    monkeypatch.setattr("pipeline.catalog.contents.find", find)
    models._stores = [NONE] if failure is not None else []
    with pytest.raises(Exception, match="no signed URLs") as refused:
        await Models._find(models, "m")
    assert is_for_now(refused.value) == isinstance(failure, StorageUnavailable)  # type: ignore[arg-type]
    await models.stop()


def test_want_of_memory_is_for_now_and_a_host_that_is_too_small_is_not() -> None:
    assert is_for_now(ResourceError("no memory is free", "model_id"))
    assert not is_for_now(NotOnThisHost("too small", "model_id"))
