"""An agent's adapters: fetched once and verified, bounded, loaded into the engine that runs and into its successors."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.catalog import adapters as published
from pipeline.catalog import pulled_adapters
from pipeline.catalog.adapter_entry import AdapterEntry
from pipeline.config.load import resolve
from pipeline.config.schema import AdapterConfig, ModelConfig
from pipeline.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    ResourceError,
    StarlingError,
)
from pipeline.fleet.bodies import LoadModelRequest
from pipeline.models.collect import collect
from stages.agent import adapters
from stages.agent.adapters import PARAM, Adapters
from stages.agent.cache.eviction import Bounds
from stages.agent.cache.model_cache import ModelCache
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.model import Context
from stages.agent.engines.interface import AdapterFile, Engine, EngineDied, Queue
from stages.agent.placement import Placement
from tests.fleet.coordination_stores import until
from tests.fleet.test_engines import ENTRY

SIZE = 400_000


class Recording(Engine):
    """An engine that answers at once, until the test ends it."""

    adapter = "starling"

    def __init__(self) -> None:
        self.started: list[str] = []  # the adapters that it was started with
        self.changes: list[str] = []
        self.problem: StarlingError | None = None  # of the next change
        self.may_change = asyncio.Event()
        self.may_change.set()
        self.may_unload = asyncio.Event()
        self.may_unload.set()
        self.dies = asyncio.Event()
        self.final = ""  # the adapter with which it does not start

    async def start(self) -> None:
        self.started = [one.name for one in self.adapters]

    async def ready(self) -> None:
        if self.final in self.started:
            raise EngineDied(f"no room for {self.final}", is_final=True)

    async def ended(self) -> EngineDied:
        await self.dies.wait()
        return EngineDied("killed")

    async def queue(self) -> Queue:
        return Queue()

    async def suspend(self) -> None:
        return

    async def resume(self) -> None:
        return

    async def stop(self, *, at_once: bool = False) -> None:
        return

    async def load_adapter(self, added: AdapterFile, within_s: float) -> None:
        self.changes.append(f"+{added.name}")
        await self.may_change.wait()
        if self.problem is not None:
            raise self.problem

    async def unload_adapter(self, name: str, within_s: float) -> None:
        self.changes.append(f"-{name}")
        await self.may_unload.wait()


def raw(number: int) -> bytes:
    return bytes([number]) * SIZE


def entry(name: str, number: int, rank: int = 4) -> AdapterEntry:
    return AdapterEntry(
        base="m",
        adapter=name,
        base_digest=ENTRY.digest,
        digest=hashlib.sha256(raw(number)).hexdigest(),
        bytes=SIZE,
        rank=rank,
    )


class Bench:
    """An agent's adapters with a store, and a model `m` that is placed when the first one needs it."""

    def __init__(self, folder: Path, settings: ModelConfig, most: int = 0) -> None:
        self.store = FolderStore(folder / "blobs")
        self.models_dir = folder / "models"
        cache = ModelCache(self.models_dir, Bounds(most, 0))
        self.engines: list[Recording] = []
        self.placement: Placement | None = None
        self.final = ""
        self.now = 0.0
        context = Context(
            cache, Bandwidth(0, time.monotonic), clock=lambda: self.now, sleep=lambda seconds: asyncio.sleep(0)
        )
        self.adapters = Adapters(
            resolve({}, {}),
            context,
            [self.store],
            None,
            self._place,
            lambda name: settings,
            lambda name: "vllm" if name == "theirs" else "",
            lambda: {ENTRY.digest},
        )

    async def _place(self, request: LoadModelRequest, adapter: AdapterFile, terms: object) -> Placement:
        async def bring(placement: Placement) -> None:
            return

        def make(source: object, arriving: Path | None) -> Recording:
            self.engines.append(Recording())
            self.engines[-1].final = self.final
            return self.engines[-1]

        assert (request.model_id, request.digest) == ("m", ENTRY.digest)
        if self.placement is None:
            self.placement = Placement(ENTRY, bring, make, lambda: True, adapters=(adapter,), jitter=lambda: 0.0)
        return self.placement

    async def publish(self, *entries: tuple[str, int]) -> None:
        for name, number in entries:
            await published.publish(self.store, entry(name, number), raw(number))

    async def load(self, name: str, **fields: str) -> None:
        load = await self.adapters.load(LoadModelRequest(model_id=name, **fields))  # type: ignore[arg-type]
        await load.task
        assert load.is_ready

    def file(self, number: int) -> Path:
        return pulled_adapters.file_path(self.models_dir, hashlib.sha256(raw(number)).hexdigest())


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, ModelConfig(name="m", adapters_mb=1, adapters=(AdapterConfig(name="own", path="/x"),)))
    await made.publish(("a", 1), ("b", 2), ("c", 3))
    yield made
    await made.adapters.stop()
    if made.placement is not None:
        await made.placement.stop()


async def test_a_model_starts_with_its_first_adapter_and_takes_the_second_while_it_runs(bench: Bench) -> None:
    first = bench.adapters.load(LoadModelRequest(model_id="m:a"))
    second = bench.adapters.load(LoadModelRequest(model_id="m:a"))
    loads = await asyncio.gather(first, second)
    assert loads[0] is loads[1]
    await loads[0].task
    await bench.load("m:b")
    await bench.load("m:a")
    (engine,) = bench.engines
    assert (engine.started, engine.changes) == (["a"], ["+b"])
    assert bench.placement is not None and list(bench.placement.serving) == ["a", "b"]
    assert bench.adapters.names == ("m:a", "m:b")
    assert bench.file(1).read_bytes() == raw(1)
    # The next engine is started with both.
    engine.dies.set()
    await until(lambda: len(bench.engines) == 2 and bench.placement is not None and bench.placement.state == "READY")
    await bench.load("m:b")
    assert (bench.engines[1].started, bench.engines[1].changes) == (["a", "b"], [])


async def test_an_engine_that_dies_under_a_load_has_a_successor_with_the_adapter(bench: Bench) -> None:
    await bench.load("m:a")
    (engine,) = bench.engines
    engine.may_change.clear()
    load = await bench.adapters.load(LoadModelRequest(model_id="m:b"))
    await until(lambda: engine.changes == ["+b"])
    engine.problem = EngineDied("killed")
    engine.dies.set()
    engine.may_change.set()
    await load.task
    assert load.is_ready and bench.engines[1].started == ["a", "b"]


async def test_an_adapter_that_an_engine_refuses_leaves_the_others(bench: Bench) -> None:
    await bench.load("m:a")
    bench.engines[0].problem = ResourceError("no memory for a second KV arena")
    with pytest.raises(ResourceError, match="second KV arena"):
        await bench.load("m:b")
    assert bench.adapters.names == ("m:a",)
    assert bench.placement is not None
    assert (list(bench.placement.adapters), list(bench.placement.serving)) == (["a"], ["a"])
    bench.engines[0].problem = None
    await bench.load("m:b")


async def test_an_unloaded_adapter_makes_room_for_another_one(bench: Bench) -> None:
    """1 MiB takes two of them."""
    await bench.load("m:a")
    await bench.load("m:b")
    with pytest.raises(ResourceError, match="models.adapters_mb allows 1,048,576") as refused:
        await bench.load("m:c")
    assert refused.value.param == PARAM
    await bench.adapters.unload("m:a", drop_cached=False)
    await bench.adapters.unload("m:a", drop_cached=False)
    await bench.load("m:c")
    assert bench.engines[0].changes == ["+b", "-a", "+c"]
    assert bench.file(1).exists()
    await bench.adapters.unload("m:a", drop_cached=True)
    assert not bench.file(1).exists() and pulled_adapters.read(bench.models_dir, "m:a") is None
    await bench.adapters.forget_model("m")
    assert bench.adapters.names == ()


async def test_a_caller_that_leaves_an_unload_leaves_nothing_behind(bench: Bench) -> None:
    await bench.load("m:a")
    await bench.load("m:b")
    (engine,) = bench.engines
    engine.may_unload.clear()
    caller = asyncio.ensure_future(bench.adapters.unload("m:b", drop_cached=False))
    await until(lambda: "-b" in engine.changes)
    caller.cancel()
    await asyncio.wait([caller])
    assert bench.placement is not None and list(bench.placement.serving) == ["a"]
    waiting = asyncio.ensure_future(bench.load("m:b"))
    engine.may_unload.set()
    await waiting
    assert engine.changes == ["+b", "-b", "+b"] and bench.adapters.names == ("m:a", "m:b")


async def test_an_unload_during_a_load_removes_what_the_engine_has(bench: Bench) -> None:
    await bench.load("m:a")
    (engine,) = bench.engines
    engine.may_change.clear()
    await bench.adapters.load(LoadModelRequest(model_id="m:b"))
    await until(lambda: engine.changes == ["+b"])
    with pytest.raises(Conflict, match="is loading"):
        await bench.adapters.unload("m:b", drop_cached=False, only_idle=True)
    await bench.adapters.unload("m:b", drop_cached=False)
    assert engine.changes == ["+b", "-b"] and bench.adapters.names == ("m:a",)
    # One that fails is removed before the next adapter comes.
    engine.may_change.set()
    engine.problem = ResourceError("no memory for a second KV arena")
    with pytest.raises(ResourceError):
        await bench.load("m:b")
    engine.problem = None
    await bench.load("m:c")
    assert engine.changes == ["+b", "-b", "+b", "-b", "+c"]


async def test_an_adapter_that_came_just_now_stays_for_those_who_wait(bench: Bench) -> None:
    await bench.load("m:a")
    await bench.load("m:b")
    with pytest.raises(Conflict, match="was loaded just now"):
        await bench.adapters.unload("m:b", drop_cached=False, only_idle=True)
    bench.now += 2.1
    await bench.adapters.unload("m:b", drop_cached=False, only_idle=True)
    assert bench.adapters.names == ("m:a",)


async def test_an_adapter_with_which_the_engine_cannot_start_is_left_out(bench: Bench) -> None:
    bench.final = "a"
    with pytest.raises(ModelUnavailable, match="m:a is not loaded: no room for a"):
        await bench.load("m:a")
    assert bench.placement is not None
    await bench.placement.wait()
    assert [one.started for one in bench.engines] == [["a"], []] and bench.adapters.names == ()
    await bench.load("m:b")
    assert bench.engines[1].changes == ["+b"]


async def test_a_damaged_file_does_not_end_the_engine_of_the_others(bench: Bench) -> None:
    await bench.load("m:a")
    await bench.load("m:b")
    bench.file(1).write_bytes(raw(9))
    bench.engines[0].dies.set()
    await until(lambda: len(bench.engines) == 2 and bench.placement is not None and bench.placement.state == "READY")
    assert bench.engines[1].started == ["b"]
    await bench.load("m:a")
    assert bench.engines[1].changes == ["+a"] and bench.file(1).read_bytes() == raw(1)


async def test_what_a_killed_download_leaves_is_evicted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ModelConfig(name="m"), most=SIZE + 100_000)
    await bench.publish(("a", 1))
    part = bench.models_dir / ".fetch" / f"{'f' * 64}.lora.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(raw(7))
    await bench.load("m:a")
    assert not part.exists() and bench.file(1).exists()
    # The file that its name had before goes, too.
    await bench.adapters.unload("m:a", drop_cached=False)
    await published.publish(bench.store, entry("a", 2), raw(2), replace=True)
    assert [blob.key for blob in await bench.store.scan("lora")] == [entry("a", 2).key]
    await bench.load("m:a")
    assert not bench.file(1).exists() and bench.file(2).exists()
    await bench.adapters.stop()
    assert bench.placement is not None
    await bench.placement.stop()


async def test_refusals_name_the_reason(bench: Bench) -> None:
    await published.publish(bench.store, entry("large", 4, rank=65), raw(4))
    await published.publish(bench.store, entry("own", 4), raw(4))
    for name, kind, text in (
        ("m:none", ModelNotFound, "model 'm' has no adapter 'none'; it has: m:a, m:b, m:c"),
        ("m:a/b", InvalidRequest, "expected up to 64 letters"),
        ("m:large", ModelUnavailable, "models.max_adapter_rank of this host allows 64"),
        ("m:own", Conflict, "rename one of them"),
        ("theirs:a", StarlingError, "computed by vllm"),
    ):
        with pytest.raises(kind, match=text):
            await bench.load(name)
    with pytest.raises(Conflict, match="ask for the published one"):
        await bench.load("m:a", adapter_digest="f" * 64)
    with pytest.raises(Conflict, match="ask for the published one"):
        await bench.load("m:a", digest="f" * 64)
    assert bench.engines == []
    await bench.load("m:a")
    with pytest.raises(Conflict, match="unload it first"):
        await bench.load("m:a", adapter_digest="f" * 64)


async def test_a_damaged_file_is_refused_and_fetched_again(bench: Bench) -> None:
    blob = bench.store.path(entry("a", 1).key)
    blob.chmod(0o644)
    blob.write_bytes(raw(9))
    with pytest.raises(ConfigError, match="does not have the SHA-256 in its name"):
        await bench.load("m:a")
    assert not bench.file(1).exists() and not list((bench.models_dir / ".fetch").iterdir())
    mirror = FolderStore(bench.models_dir.parent / "mirror")
    await mirror.put(entry("a", 1).key, raw(1))
    bench.adapters._stores.append(mirror)
    await bench.load("m:a")
    await bench.adapters.unload("m:a", drop_cached=False)
    bench.file(1).write_bytes(raw(8))
    await bench.load("m:a")
    assert bench.file(1).read_bytes() == raw(1)


async def test_what_is_here_needs_no_store(bench: Bench) -> None:
    await bench.load("m:a")
    await bench.adapters.unload("m:a", drop_cached=False)
    bench.adapters._stores.clear()
    await bench.load("m:a")
    with pytest.raises(ModelUnavailable, match="has no signed URL"):
        await bench.load("m:b")


async def test_files_count_against_the_cache_and_the_oldest_goes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ModelConfig(name="m"), most=2 * SIZE + 100_000)
    await bench.publish(("a", 1), ("b", 2), ("c", 3))
    for number, name in enumerate(("m:a", "m:b"), 1):
        await bench.load(name)
        record = pulled_adapters.record_path(bench.models_dir, name)
        os.utime(record, (number, number))
    with pytest.raises(ResourceError, match="fleet.cache_mb"):
        await bench.load("m:c")  # those that are loaded stay
    await bench.adapters.unload("m:a", drop_cached=False)
    await bench.adapters.unload("m:b", drop_cached=False)
    await bench.load("m:c")
    assert [bench.file(number).exists() for number in (1, 2, 3)] == [False, True, True]
    # Pulled files are not taken for what a server has prepared.
    assert [item.path for item in collect(bench.models_dir, (), is_dry=False)] == []
    await bench.adapters.stop()
    assert bench.placement is not None
    await bench.placement.stop()


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    pulled_adapters.write(tmp_path, entry("a", 1))
    assert pulled_adapters.read(tmp_path, "m:a") == entry("a", 1)
    pulled_adapters.record_path(tmp_path, "m:a").write_bytes(msgspec.json.encode({"base": "m"}))
    assert pulled_adapters.read(tmp_path, "m:a") is None and pulled_adapters.read_all(tmp_path) == []


# ------------------------------------------------------------------ loads and unloads at the same time


async def turns() -> None:
    """Let every task go on until it waits for what the test holds back."""
    for _ in range(30):
        await asyncio.sleep(0)


async def test_a_load_that_has_waited_for_its_entry_waits_for_an_unload(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.load("m:a")
    (engine,) = bench.engines
    asked, may_go, entry_of = asyncio.Event(), asyncio.Event(), bench.adapters._entry_of

    async def late(request: LoadModelRequest) -> AdapterEntry:
        found = await entry_of(request)
        asked.set()
        await may_go.wait()
        return found

    monkeypatch.setattr(bench.adapters, "_entry_of", late)
    loading = asyncio.create_task(bench.load("m:b"))
    await asked.wait()
    monkeypatch.setattr(bench.adapters, "_entry_of", entry_of)
    await bench.load("m:b")
    engine.may_unload.clear()
    unloading = asyncio.create_task(bench.adapters.unload("m:b", drop_cached=False))
    await until(lambda: "-b" in engine.changes)
    may_go.set()
    await turns()
    engine.may_unload.set()
    await asyncio.gather(unloading, loading)
    assert bench.placement is not None and list(bench.placement.serving) == ["a", "b"]
    assert bench.adapters.names == ("m:a", "m:b"), "what the engine has can be unloaded"


async def test_an_unload_of_an_idle_adapter_does_not_end_the_load_that_has_replaced_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.load("m:a")
    await bench.load("m:b")
    bench.now += 2.1
    (engine,) = bench.engines
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def queue() -> Queue:
        asked.set()
        await may_answer.wait()
        return Queue()

    monkeypatch.setattr(engine, "queue", queue)
    unloading = asyncio.create_task(bench.adapters.unload("m:b", drop_cached=False, only_idle=True))
    await asked.wait()
    await bench.adapters.unload("m:b", drop_cached=False)
    await bench.load("m:b")
    may_answer.set()
    with pytest.raises(Conflict, match="was loaded just now"):
        await unloading
    assert bench.placement is not None and list(bench.placement.serving) == ["a", "b"]
    assert engine.changes == ["+b", "-b", "+b"]


async def test_a_load_begins_after_its_file_has_been_removed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.load("m:a")
    order: list[str] = []
    begun, may_end = threading.Event(), threading.Event()
    remove, bring = bench.adapters._context.cache.remove_adapter, adapters.bring_adapter

    def removing(digest: str) -> None:
        order.append("removal")
        begun.set()
        assert may_end.wait(60)
        remove(digest)
        order.append("removed")

    def bringing(*arguments: Any) -> Awaitable[Path]:
        order.append("brought")
        return bring(*arguments)

    async def found(request: LoadModelRequest) -> AdapterEntry:
        return entry("a", 1)

    monkeypatch.setattr(bench.adapters._context.cache, "remove_adapter", removing)
    monkeypatch.setattr(adapters, "bring_adapter", bringing)
    monkeypatch.setattr(bench.adapters, "_entry_of", found)
    unloading = asyncio.create_task(bench.adapters.unload("m:a", drop_cached=True))
    await until(begun.is_set)
    loading = asyncio.create_task(bench.load("m:a"))
    await turns()
    may_end.set()
    await asyncio.gather(unloading, loading)
    assert order == ["removal", "removed", "brought"]
    assert bench.file(1).exists()
