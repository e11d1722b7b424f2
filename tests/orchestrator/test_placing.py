"""The leader places models by the catalog: it reads that first, and does without one that cannot be read.

A placement can be ended when its model is gone, and a cordon when its agent is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.catalog.entry import PART_BYTES, Entry, Source
from pipeline.errors import ModelNotFound, NotFound
from pipeline.fleet import token
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.fleet_api import EventLog, FleetApi, Placement
from stages.orchestrator.registry import Cordon, Registry
from tests.e2e.server import poll_until
from tests.fleet.range_server import Handler, RangeServer, served
from tests.orchestrator.agents import router
from tests.orchestrator.fleet import DIGEST, Fleet, TestAgent

ENGINE: Any = SimpleNamespace(port=1)  # no request is sent to it
POLLS = 20  # in which a leader that does not wait has long placed the model
ENTRY = Entry(
    name="cold",
    digest=DIGEST,
    source=Source(file="m.gguf", bytes=1),
    index_sha256="b" * 64,
    index_bytes=10,
    weights_bytes=PART_BYTES,
    weights_checksum="c" * 32,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RangeServer]:
    """A blob store with the entry of one model."""
    root = tmp_path / "blobs"
    root.mkdir()
    (root / "catalog.json").write_bytes(msgspec.json.encode([ENTRY]))
    with served(root) as server:
        yield server


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_leader_places_when_it_has_read_the_catalog(tmp_path: Path, store: RangeServer, is_readable: bool) -> None:
    """An agent without credentials needs what the catalog says of a model, and refuses a load without it."""
    may_answer = threading.Event()

    def hold(handler: Handler, body: bytes) -> bool:
        assert may_answer.wait(60)
        if not is_readable:
            handler.refuse(403)
        return not is_readable

    store.fault = hold
    fleet = Fleet(tmp_path / "fleet", {"fleet": {"blobs": store.url, "orchestrator": {"poll_ms": 50}}})
    try:
        agent = fleet.agents["one"] = TestAgent("one", fleet.secret)
        agent.may_load.set()
        agent.cold["cold"] = ENGINE
        fleet.write("placements/cold", b'{"model":"cold","replicas":1}')
        fleet.register(agent)
        fleet.wait(lambda state: agent.polls >= POLLS or agent.loads)
        may_answer.set()
        fleet.wait(lambda state: [len(one["loaded_models"]) for one in state["agents"]] == [1])
        assert agent.digests == [DIGEST if is_readable else ""]
    finally:
        may_answer.set()
        assert fleet.close() == 0, "".join(fleet.lines)


def test_a_model_that_was_published_just_now_can_be_placed(tmp_path: Path, store: RangeServer) -> None:
    catalog = store.root / "catalog.json"
    published = catalog.read_bytes()
    catalog.write_bytes(b"[]")
    fleet = Fleet(tmp_path / "fleet", {"fleet": {"blobs": store.url, "orchestrator": {"poll_ms": 50}}})

    def place() -> int:
        body = {"model": "cold", "replicas": 1}
        return fleet.post("/v1/fleet/place", body, token.authorization(fleet.secret)).status

    try:
        poll_until(lambda: store.requests)
        assert place() == 404
        catalog.write_bytes(published)
        assert place() == 200
    finally:
        assert fleet.close() == 0, "".join(fleet.lines)


class Store:
    """A fleet's API, and what it writes into the store."""

    def __init__(self) -> None:
        unused: Any = None
        self.written: list[tuple[str, bytes | None]] = []
        self.registry = Registry(unused, lambda: 0.0)
        self.cold = ColdLoads(unused, 100, lambda: 0.0)
        events = EventLog(lambda: 0.0)
        self.api = FleetApi("front", self.registry, router(), unused, self.cold, self._write, events)

    async def _write(self, key: str, value: bytes | None) -> None:
        self.written.append((key, value))

    async def change(self, name: str, **fields: object) -> Any:
        return await self.api.change(name, msgspec.json.encode(fields), "application/json")


async def test_the_placement_of_a_model_that_is_gone_can_be_ended() -> None:
    store = Store()
    with pytest.raises(ModelNotFound):
        await store.change("place", model="gone", replicas=0)
    store.api.placements["placements/gone"] = Placement("gone", 2)
    assert await store.change("place", model="gone", replicas=0) == {"model": "gone", "replicas": 0, "ready": 0}
    assert store.written == [("placements/gone", None)]
    with pytest.raises(ModelNotFound):
        await store.change("place", model="gone", replicas=1)


async def test_the_cordon_of_an_agent_that_has_left_can_be_ended() -> None:
    store = Store()
    with pytest.raises(NotFound, match="there is no agent 'gone'"):
        await store.change("cordon", agent="gone", cordoned=False)
    store.registry.set_cordons({"gone": Cordon()})
    await store.change("cordon", agent="gone", cordoned=False)
    assert store.written == [("cordons/gone", None)]
