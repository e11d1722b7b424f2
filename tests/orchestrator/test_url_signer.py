"""URLs are signed only for agents that need them, and only for the models that they were told to load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.catalog.adapter_entry import AdapterEntry
from pipeline.catalog.entry import PART_BYTES, Entry, Source
from pipeline.errors import ConfigError, StorageUnavailable
from pipeline.fleet.bodies import MAX_URLS, HeartbeatResponse, LoadedModel, ModelState, WantedUrls
from stages.orchestrator import signed_urls
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.placement import Load, stalled_loads
from stages.orchestrator.signed_urls import FIRST, MAX_LOADS, PROMPT_S, UrlSigner


class SigningFolder(FolderStore):
    """A directory whose URLs are numbered."""

    can_sign = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.signed: list[str] = []
        self.token = ""  # of a role
        self.problem: Exception | None = None
        self.begun, self.may_sign = asyncio.Event(), asyncio.Event()
        self.may_sign.set()

    async def sign(self, keys: Sequence[str], valid_s: int) -> dict[str, str]:
        self.begun.set()
        await self.may_sign.wait()
        if self.problem is not None:
            raise self.problem
        self.signed += keys
        return {key: f"https://bucket/{key}?signature={len(self.signed)}{self.token}" for key in keys}


def entry(name: str, digit: str = "a") -> Entry:
    return Entry(
        name=name,
        digest=digit * 64,
        source=Source(file="m.gguf", bytes=1),
        index_sha256="b" * 64,
        index_bytes=10,
        weights_bytes=100 * PART_BYTES,
        weights_checksum="c" * 32,
    )


TINY, OTHER = entry("tiny"), entry("other", "d")


class Bench:
    """A signer with a catalog of two models, and one agent."""

    def __init__(self, folder: Path) -> None:
        self.store = SigningFolder(folder)
        self.now = 100.0
        self.polled: list[str] = []
        self.signer = UrlSigner(self.store, 600, self.polled.append, lambda: self.now)
        self.signer.set_entries([TINY, OTHER])

    async def heartbeat(
        self,
        *wanted: WantedUrls,
        downloading: Sequence[str] = ("tiny",),
        takes: bool = True,
        state: ModelState = "DOWNLOADING",
        requests: Sequence[str] = (),
        incarnation: str = "1",
    ) -> set[str]:
        """What the agent gets with the heartbeat after one that says this: keys."""
        models = [LoadedModel(model_id=name, model_state=state, cache_level="REMOTE") for name in downloading]
        self.signer.observe(
            HeartbeatResponse(
                agent_id="one",
                incarnation=incarnation,
                state="IDLE",
                takes_signed_urls=takes,
                wanted_urls=wanted,
                loaded_models=tuple(models),
            ),
            requests.__contains__,
        )
        await asyncio.gather(*self.signer._tasks.values())
        return {key for given in self.signer.take("one") for key in given.urls}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def wanted(model: Entry, *parts: int) -> WantedUrls:
    return WantedUrls(model_id=model.name, keys=tuple(model.part_key(part) for part in parts))


async def test_a_load_carries_the_first_urls(bench: Bench) -> None:
    await bench.heartbeat(downloading=())
    given = await bench.signer.begin("one", "tiny")
    assert given is not None
    assert given.entry == TINY and given.valid_s == 600
    assert list(given.urls) == [TINY.index_key, *(TINY.part_key(part) for part in range(FIRST - 1))]


async def test_an_agent_that_does_not_say_that_it_needs_urls_gets_none(bench: Bench) -> None:
    """As an older one, which would refuse the field."""
    assert await bench.signer.begin("one", "tiny") is None
    await bench.heartbeat(takes=False)
    assert await bench.signer.begin("one", "tiny") is None
    await bench.heartbeat()
    assert await bench.signer.begin("one", "unpublished") is None
    bench.store.can_sign = False
    assert await bench.signer.begin("one", "tiny") is None
    assert bench.store.signed == []


async def test_urls_are_signed_for_the_loads_that_were_asked_for_only(bench: Bench) -> None:
    assert await bench.heartbeat(wanted(TINY, 40)) == set()
    await bench.signer.begin("one", "tiny")
    bench.store.signed.clear()
    assert await bench.heartbeat(wanted(TINY, 40, 41), wanted(OTHER, 1)) == {TINY.part_key(40), TINY.part_key(41)}
    # Keys of another model, of the catalog, of no blob; and more than one body may have.
    stolen = WantedUrls(model_id="tiny", keys=(OTHER.part_key(0), "catalog/tiny.json", TINY.part_key(100), "../x"))
    assert await bench.heartbeat(stolen) == set()
    assert len(await bench.heartbeat(wanted(TINY, *range(100)))) == MAX_URLS
    assert all(key.startswith(TINY.folder) for key in bench.store.signed)


async def test_urls_are_signed_for_the_requests_at_an_engine_that_another_orchestrator_has_loaded(bench: Bench) -> None:
    assert await bench.heartbeat(wanted(TINY, 1), state="READY") == set()
    assert await bench.heartbeat(wanted(TINY, 1), downloading=(), requests=["tiny"]) == set()
    assert await bench.heartbeat(wanted(TINY, 1), state="READY", takes=False, requests=["tiny"]) == set()
    some = wanted(TINY, 1), wanted(OTHER, 1)
    assert await bench.heartbeat(*some, state="READY", requests=["tiny"]) == {TINY.part_key(1)}
    assert bench.polled == ["one"]
    # For the whole of the download, and not for the next one.
    assert await bench.heartbeat(wanted(TINY, 2), state="READY") == {TINY.part_key(2)}
    assert await bench.heartbeat(downloading=()) == set()
    assert await bench.heartbeat(wanted(TINY, 1), state="READY") == set()


async def test_urls_end_with_the_load(bench: Bench) -> None:
    await bench.heartbeat()
    await bench.signer.begin("one", "tiny")
    assert await bench.heartbeat(wanted(TINY, 1), downloading=()) == {TINY.part_key(1)}  # it has not begun yet
    bench.signer.end("one", "tiny")
    assert await bench.heartbeat(wanted(TINY, 1)) == {TINY.part_key(1)}  # it answered 202 and still downloads
    # Its engine may be ready while the weights still arrive.
    assert await bench.heartbeat(state="READY") == set()
    assert await bench.heartbeat(wanted(TINY, 2), state="READY") == {TINY.part_key(2)}
    assert bench.signer.has_told("one", "tiny")
    assert await bench.heartbeat(wanted(TINY, 1), downloading=()) == set()
    assert not bench.signer.has_told("one", "tiny")
    assert await bench.heartbeat(wanted(TINY, 1)) == set()
    await bench.signer.begin("one", "tiny")
    bench.signer.end("one", "tiny")
    assert await bench.heartbeat(wanted(TINY, 1), state="FAILED") == set()


async def test_an_agent_that_has_left_gets_nothing(bench: Bench) -> None:
    await bench.heartbeat()
    await bench.signer.begin("one", "tiny")
    bench.store.may_sign.clear()
    bench.store.begun.clear()
    heartbeat = asyncio.create_task(bench.heartbeat(wanted(TINY, 1)))
    await bench.store.begun.wait()
    bench.signer.forget("one")
    bench.store.may_sign.set()
    assert await heartbeat == set()
    bench.signer.end("one", "tiny")
    assert await bench.heartbeat(wanted(TINY, 1)) == set()


async def test_a_load_goes_on_when_an_agent_registers_again(bench: Bench) -> None:
    """Its lease has ended for some seconds, and the request to load the model still waits for its answer."""
    await bench.heartbeat()
    await bench.signer.begin("one", "tiny")
    bench.signer.forget("one")
    assert bench.signer.take("one") == ()
    assert await bench.heartbeat(wanted(TINY, 1)) == {TINY.part_key(1)}
    bench.signer.end("one", "tiny")
    assert await bench.heartbeat(wanted(TINY, 2)) == {TINY.part_key(2)}
    bench.signer.forget("one")  # without a request that waits
    assert await bench.heartbeat(wanted(TINY, 3)) == set()


async def test_an_agent_that_has_started_anew_gets_nothing_for_its_loads_of_before(bench: Bench) -> None:
    """It loads the model by itself; the request of before is about to fail."""
    await bench.heartbeat()
    await bench.signer.begin("one", "tiny")
    bench.signer.forget("one")
    assert await bench.heartbeat(wanted(TINY, 1), incarnation="2") == set()
    assert not bench.signer.has_told("one", "tiny")
    bench.signer.end("one", "tiny")
    await bench.signer.begin("one", "tiny")
    assert await bench.heartbeat(wanted(TINY, 1), incarnation="2") == {TINY.part_key(1)}


async def test_nothing_is_kept_of_a_load_that_ends_after_its_agent(bench: Bench) -> None:
    await bench.heartbeat()
    await bench.signer.begin("one", "tiny")
    bench.signer.forget("one")
    bench.signer.end("one", "tiny")
    assert bench.signer._loads == {}


async def test_the_loads_that_are_remembered_are_bounded(bench: Bench) -> None:
    names = [f"m{number}" for number in range(MAX_LOADS + 5)]
    bench.signer.set_entries([entry(name) for name in names])
    await bench.heartbeat()
    for name in names:
        await bench.signer.begin("one", name)
    assert [bench.signer.has_told("one", name) for name in names] == [False] * 5 + [True] * MAX_LOADS


async def test_what_an_agent_gets_at_once_is_bounded(bench: Bench) -> None:
    """A body that is too large would be refused, and the agent lost with its heartbeats."""
    bench.signer.set_entries([entry(name) for name in "abc"])
    bench.store.token = "x" * 7000
    await bench.heartbeat()
    given = [await bench.signer.begin("one", name) for name in "abc"]
    assert all(one is not None and len(msgspec.json.encode(one)) < 200_000 and len(one.urls) > 10 for one in given)
    every = [msgspec.structs.replace(wanted(TINY, *range(64)), model_id=name) for name in "abc"]
    assert len(await bench.heartbeat(*every, downloading="abc")) > 10
    assert [one.entry.name for one in bench.signer.take("one")] == ["c"]
    assert bench.signer.take("one") == ()
    bench.store.token = "x" * 9000
    given = [await bench.signer.begin("one", "a")]
    assert [one and one.urls for one in given] == [{}]


async def test_a_load_that_is_cancelled_is_not_signed_for(bench: Bench) -> None:
    await bench.heartbeat()
    bench.store.may_sign.clear()
    begun = asyncio.create_task(bench.signer.begin("one", "tiny"))
    while not bench.signer.has_told("one", "tiny"):
        await asyncio.sleep(0)
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    bench.store.may_sign.set()
    assert await bench.heartbeat(wanted(TINY, 1), downloading=()) == set()


async def test_without_credentials_a_load_waits_for_later_urls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.heartbeat()
    bench.store.problem = ConfigError("no credentials")
    given = await bench.signer.begin("one", "tiny")
    assert given is not None and given.urls == {}
    assert await bench.heartbeat(wanted(TINY, 0)) == set()
    bench.store.problem = None
    monkeypatch.setattr(signed_urls, "SIGN_S", 0.01)
    bench.store.may_sign.clear()  # they are fetched, and do not come
    assert await bench.heartbeat(wanted(TINY, 0)) == set()
    bench.store.may_sign.set()
    assert await bench.heartbeat(wanted(TINY, 0)) == {TINY.part_key(0)}


async def test_an_agent_that_is_rolled_back_gets_no_urls(bench: Bench) -> None:
    """Those that were signed for it before. Its older version refuses a body with them."""
    await bench.heartbeat()
    await bench.signer.begin("one", "tiny")
    bench.store.may_sign.clear()
    heartbeat = asyncio.create_task(bench.heartbeat(wanted(TINY, 1)))
    while not bench.signer._tasks:
        await asyncio.sleep(0)
    task = bench.signer._tasks["one"]
    older = asyncio.create_task(bench.heartbeat(takes=False))
    bench.store.may_sign.set()
    assert (await older, await heartbeat) == (set(), set())
    assert task.done()
    assert await bench.heartbeat() == set()  # nothing of before is kept for a later version


async def test_an_error_of_the_library_is_logged_without_its_text(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "starling.orchestrator")
    await bench.heartbeat()
    bench.store.problem = ValueError("https://bucket/x?signature=abc")
    given = await bench.signer.begin("one", "tiny")
    assert given is not None and given.urls == {}
    assert await bench.heartbeat(wanted(TINY, 0)) == set()
    found = [(record.message, record.__dict__["reason"]) for record in caplog.records]
    reason = f"{bench.store.address}: ValueError of the store's library"
    assert found == [("URLs of blobs cannot be signed", reason)] * 2
    bench.store.problem = None
    assert await bench.heartbeat(wanted(TINY, 0)) == {TINY.part_key(0)}


async def test_an_agent_that_waits_is_polled_soon_but_not_all_the_time(bench: Bench) -> None:
    await bench.heartbeat()
    await bench.signer.begin("one", "tiny")
    for _ in range(3):
        await bench.heartbeat(wanted(TINY, 1))
    assert bench.polled == ["one"]
    bench.now += PROMPT_S
    await bench.heartbeat(wanted(TINY, 1))
    assert bench.polled == ["one"] * 2


def view(agent: str, state: str, waits: bool, **changes: object) -> NodeView:
    details = HeartbeatResponse(
        agent_id=agent,
        incarnation="1",
        state="IDLE",
        loaded_models=(LoadedModel(model_id="tiny", model_state=state, cache_level="REMOTE"),) if state else (),  # type: ignore[arg-type]
        wanted_urls=(wanted(TINY, 0),) if waits else (),
    )
    return msgspec.structs.replace(NodeView(agent_id=agent, url="", details=details), **changes)


@pytest.mark.parametrize(("table", "agents"), [
    ([view("a", "DOWNLOADING", True)], ["a"]),
    ([view("a", "DOWNLOADING", False)], []),
    ([view("a", "DOWNLOADING", True, health="SUSPECT")], []),
    ([view("a", "DOWNLOADING", True, may_start=False)], []),
    ([view("a", "DOWNLOADING", True), view("b", "READY", False)], ["a"]),
    # One that pretends to load a model which enough others have.
    ([view("a", "DOWNLOADING", True), view("b", "READY", False), view("c", "READY", False)], []),
    ([view("a", "", True)], []),
])  # fmt: skip
def test_the_leader_asks_again_for_a_load_of_another_orchestrator(table: list[NodeView], agents: list[str]) -> None:
    told = [(agent, "tiny") for agent in agents]
    assert stalled_loads([("tiny", 2)], table, lambda *load: False) == [Load("tiny", agent) for agent in agents]
    assert stalled_loads([("tiny", 2)], table, lambda *load: load in told) == []
    assert stalled_loads([("other", 2)], table, lambda *load: False) == []


async def test_the_file_of_an_adapter_is_signed_for_an_agent_that_needs_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    adapter = AdapterEntry(
        base="tiny", adapter="a", base_digest=TINY.digest, digest="e" * 64, bytes=10, rank=4, source="a.gguf"
    )
    bench.signer.set_entries([TINY], [adapter])
    assert await bench.signer.adapter("one", "tiny:a") is None, "it reads the store by itself"
    await bench.heartbeat()
    signed = await bench.signer.adapter("one", "tiny:a")
    assert signed is not None and signed.entry == adapter and adapter.key in signed.url
    assert "signature" not in repr(signed)
    assert await bench.signer.adapter("one", "tiny:b") is None and await bench.signer.adapter("one", "tiny") is None
    bench.store.problem = RuntimeError("no role")
    with pytest.raises(StorageUnavailable, match="RuntimeError of the store's library"):
        await bench.signer.adapter("one", "tiny:a")
