"""A request for a model that was published a moment before finds it, and reads are bounded all the same."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.catalog.entry import PART_BYTES, Entry, Source
from pipeline.errors import StorageUnavailable
from stages.orchestrator import catalog_reader
from stages.orchestrator.catalog_reader import MISS_S, CatalogReader
from tests.fleet.coordination_stores import Clock

ROUTER: Any = SimpleNamespace(resolve=lambda model: model, has=lambda model: False)
SIGNER: Any = SimpleNamespace(set_entries=lambda entries, adapters: None)
ENTRY = Entry(
    name="late",
    digest="a" * 64,
    source=Source(file="m.gguf", bytes=1),
    index_sha256="b" * 64,
    index_bytes=10,
    weights_bytes=PART_BYTES,
    weights_checksum="c" * 32,
)


class Bench:
    """A reader, its catalog, and a clock that sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.catalog: list[Entry] = []
        self.is_readable = True
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.reads: list[float] = []  # when each began
        self.clock = Clock()
        self.published: dict[str, Any] = {}
        monkeypatch.setattr(catalog_reader.contents, "entries", self.entries)
        monkeypatch.setattr(catalog_reader, "published_adapters", self.adapters)
        blobs: Any = None
        self.reader = CatalogReader(blobs, self.published, SIGNER, ROUTER, self.clock, self.sleep)

    async def entries(self, blobs: Any) -> list[Entry]:
        self.reads.append(self.clock.now)
        found = list(self.catalog)
        await self.may_answer.wait()
        if not self.is_readable:
            raise StorageUnavailable("down")
        return found

    async def adapters(self, blobs: Any) -> list[Any]:
        return []

    async def sleep(self, seconds: float) -> None:
        until = self.clock.now + seconds
        await asyncio.sleep(0)
        self.clock.now = max(self.clock.now, until)


async def test_a_model_is_found_that_was_published_after_a_read_of_the_same_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    begun = bench.clock.now
    await bench.reader.learn("late")
    assert not bench.published
    bench.clock.now += 0.25
    bench.catalog.append(ENTRY)
    await bench.reader.learn("late")
    assert "late" in bench.published
    assert bench.reads == [begun, begun + MISS_S]


async def test_a_read_that_began_before_the_question_does_not_answer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.may_answer.clear()
    first = asyncio.create_task(bench.reader.learn("other"))
    while not bench.reads:
        await asyncio.sleep(0)
    bench.clock.now += 0.25
    bench.catalog.append(ENTRY)
    second = asyncio.create_task(bench.reader.learn("late"))
    await asyncio.sleep(0)
    bench.may_answer.set()
    await asyncio.gather(first, second)
    assert "late" in bench.published


async def test_many_questions_for_unknown_models_share_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    begun = bench.clock.now
    await bench.reader.learn("none")
    for _ in range(3):
        bench.clock.now += 0.125
        await asyncio.gather(*(bench.reader.learn(f"none-{number}") for number in range(20)))
    assert bench.reads[:2] == [begun, begun + MISS_S]
    assert all(later - earlier >= MISS_S for earlier, later in zip(bench.reads, bench.reads[1:], strict=False))
    assert len(bench.reads) == 4


async def test_a_catalog_that_cannot_be_read_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.is_readable = False
    bench.may_answer.clear()
    tasks = [asyncio.create_task(bench.reader.learn("none")) for _ in range(2)]
    while not bench.reads:
        await asyncio.sleep(0)
    bench.clock.now += 0.25
    tasks.append(asyncio.create_task(bench.reader.learn("none")))
    await asyncio.sleep(0)
    bench.may_answer.set()
    await asyncio.gather(*tasks)
    assert len(bench.reads) == 1
