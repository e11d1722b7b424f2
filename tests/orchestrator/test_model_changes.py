"""Loads on agents: how long they may take, and what is measured of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.errors import Conflict, ResourceError
from pipeline.fleet.bodies import LoadModelResponse, ModelState
from pipeline.fleet.records import AgentRecord
from stages.orchestrator.fleet_api import EventLog
from stages.orchestrator.forward import Forward, NotRefused, StillLoading, Tries
from stages.orchestrator.model_changes import MAX_MODELS, REFUSED_S, ModelChanges
from stages.orchestrator.rates import START_S
from stages.orchestrator.registry import Registry
from stages.orchestrator.router import ScoreRouter
from stages.orchestrator.signed_urls import UrlSigner
from tests.orchestrator.agents import MODEL, PUBLISHED, cached, engine, request, router, view

TIMEOUT_S = 600.0


class Agent:
    """An agent: how long each of its answers to /load_model takes, in s, and the state that it names."""

    def __init__(self, *answers: tuple[float, ModelState]) -> None:
        self.now = 0.0
        self._answers = list(answers)

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        took_s, state = self._answers.pop(0)
        self.now += took_s
        status = "success" if state == "READY" else "loading"
        return msgspec.json.encode(LoadModelResponse(status=status, model_id=MODEL, model_state=state))  # type: ignore[arg-type]

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def answers(agent_id: str) -> bool:
    return True


async def made(
    folder: Path, agent: Agent, routing: ScoreRouter, check: Callable[[str], Awaitable[bool]] = answers
) -> tuple[ModelChanges, EventLog]:
    registry, events = Registry(None, lambda: agent.now), EventLog(lambda: 0.0)  # type: ignore[arg-type]
    await registry.register_node(AgentRecord(agent_id="one", url="http://one", incarnation="1"))
    changes = ModelChanges(
        agent,  # type: ignore[arg-type]
        registry,
        routing,
        events,
        PUBLISHED,
        int(TIMEOUT_S * 1000),
        lambda: True,
        check,
        lambda: agent.now,
        UrlSigner(FolderStore(folder), 600, lambda agent_id: None, lambda: agent.now),
        agent.sleep,
    )
    return changes, events


async def test_a_load_that_takes_too_long_has_failed_for_those_who_wait(tmp_path: Path) -> None:
    changes, events = await made(tmp_path, Agent((TIMEOUT_S, "DOWNLOADING")), router(view("one")))
    with pytest.raises(StillLoading, match=r"within 600 s \(fleet\.orchestrator\.load_timeout_ms\)"):
        await changes.load("one", MODEL)
    assert [one.kind for one in events.after(0)] == ["load", "load-failed"]


async def test_a_model_whose_engine_has_ended_before_the_answer_is_waited_for(tmp_path: Path) -> None:
    agent = Agent((5.0, "LOADING_TO_GPU"), (5.0, "READY"))
    changes, events = await made(tmp_path, agent, router(view("one")))
    await changes.load("one", MODEL)
    assert events.after(0)[-1].kind == "loaded"


async def test_an_agent_that_is_not_asked_has_refused_nothing(tmp_path: Path) -> None:
    """Without the store, or without what is signed by one, no load is begun."""
    agent = Agent()
    changes, events = await made(tmp_path, agent, router(view("one")))
    with pytest.raises(NotRefused, match="two has left"):
        await changes.load("two", MODEL)
    changes._is_store_up = lambda: False
    with pytest.raises(NotRefused, match="store"):
        await changes.load("one", MODEL)
    assert events.after(0) == []


async def test_no_model_leaves_for_a_further_copy(tmp_path: Path) -> None:
    class Full(Agent):
        paths: list[str] = []

        async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
            self.paths.append(path)
            raise ResourceError("unload a model", "model_id")

    agent = Full()
    changes, events = await made(tmp_path, agent, router(view("one", engine("other"))))
    with pytest.raises(ResourceError):
        await changes.load("one", MODEL, None)
    assert agent.paths == ["/load_model"]
    assert [(one.kind, one.text) for one in events.after(0)] == [
        ("load", "the agents that have it are full"),
        ("load-failed", "unload a model"),
    ]


async def test_models_do_not_leave_again_for_one_that_did_not_fit_without_them(tmp_path: Path) -> None:
    class Full(Agent):
        left: list[str] = []
        has_room = False

        async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
            if path == "/load_model":
                if self.has_room:
                    return b"{}"
                raise ResourceError("unload a model", "model_id")
            self.left.append(msgspec.json.decode(body)["model_id"])
            return b"{}"

    agent = Full()
    views = [view("one", engine("placed"), engine("idle"), max_models=9)]
    routing = router(*views)
    placements = {"placed": 1, MODEL: 1}
    routing.eviction.placements = placements.items
    changes, _ = await made(tmp_path, agent, routing)

    async def refused(evict: str = "") -> list[str]:
        agent.left.clear()
        with pytest.raises(ResourceError):
            await changes.load("one", MODEL, evict)
        return list(agent.left)

    assert await refused() == ["idle"]
    assert await refused() == await refused("idle") == []
    agent.now = REFUSED_S
    assert await refused() == ["idle"]
    # What stayed then is busy no more, or placed no more.
    del placements["placed"]
    routing.update_routing_table(views)
    assert sorted(await refused()) == ["idle", "placed"]
    assert await refused() == []
    # It has fitted since.
    agent.has_room = True
    await changes.load("one", MODEL)
    agent.has_room = False
    assert sorted(await refused()) == ["idle", "placed"]


async def test_a_model_whose_place_another_load_has_taken_may_displace_that_one_later(tmp_path: Path) -> None:
    """Both loads make the same model leave, and the table has neither of them."""

    class OnePlace(Agent):
        held = {"idle"}

        async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
            name = msgspec.json.decode(body)["model_id"]
            if path == "/unload_model":
                self.held.discard(name)
            elif self.held:
                raise ResourceError("unload a model", MAX_MODELS)
            else:
                self.held.add(name)
            return b"{}"

    agent = OnePlace()
    routing = router(view("one", engine("idle"), max_models=1))
    changes, _ = await made(tmp_path, agent, routing)
    loads = [changes.load("one", name, "idle") for name in ("other", MODEL)]
    _, refused = await asyncio.gather(*loads, return_exceptions=True)
    assert isinstance(refused, ResourceError) and agent.held == {"other"}
    routing.update_routing_table([view("one", engine("other"), max_models=1)])
    await changes.load("one", MODEL, "other")
    assert agent.held == {MODEL}


def test_no_other_agent_begins_a_load_that_one_goes_on_with() -> None:
    tries = Tries(lambda: 0.0)
    forward = Forward(routed=request(), path="/v1/generate", body=b"{}", headers={})
    with pytest.raises(StillLoading):
        tries.not_loaded(forward, "one", StillLoading("it is slow"))
    assert not tries.unfit


@pytest.mark.parametrize(("level", "load_s", "start_s"), [
    ("DRAM_CACHED", START_S / 2, START_S / 2),
    ("NVME_CACHED", START_S / 2 + PUBLISHED[MODEL].nbytes / 1e9, START_S / 2),
    ("REMOTE", 60.0, None),  # most of which is a download
])  # fmt: skip
async def test_the_start_of_an_engine_corrects_the_next_estimate(
    tmp_path: Path, level: str, load_s: float, start_s: float | None
) -> None:
    files = () if level == "REMOTE" else (cached(cache_level=level),)
    routing = router(view("one", cached_models=files))

    async def check(agent_id: str) -> bool:
        routing.update_routing_table([view("one", engine(load_s=load_s), cached_models=files)])
        return True

    changes, _ = await made(tmp_path, Agent((load_s, "READY")), routing, check)
    await changes.load("one", MODEL)
    measured = routing.rates.of("one", MODEL).start_s
    assert measured.count == (start_s is not None)
    assert measured.value == pytest.approx(START_S if start_s is None else START_S + 0.2 * (start_s - START_S))


@pytest.mark.parametrize("ends", ["/load_model", "/unload_model"])
async def test_an_orchestrator_that_leads_no_more_makes_no_further_call(tmp_path: Path, ends: str) -> None:
    """Its term ends while an agent answers."""
    is_wanted = [True]

    class Full(Agent):
        paths: list[str] = []

        async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
            self.paths.append(path)
            is_wanted[0] = path != ends
            if path == "/load_model":
                raise ResourceError("unload a model", "model_id")
            return b"{}"

    agent = Full()
    agent.paths = []
    changes, _ = await made(tmp_path, agent, router(view("one", engine("other"), engine("third"))))
    changes.is_wanted = lambda model, agent_id: is_wanted[0]
    with pytest.raises(Conflict, match="does not lead"):
        await changes.load("one", MODEL)
    assert agent.paths == ["/load_model", "/unload_model"][: 1 if ends == "/load_model" else 2]
