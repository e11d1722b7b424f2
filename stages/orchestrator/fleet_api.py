"""The fleet as its operators see and change it: state, models, events, reasons, placements and cordons.

Changes are written into the coordination store, from where every orchestrator reads them.  Without sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from pipeline.api.adapter_names import sort_key
from pipeline.api.fields import flag, integer, read_fields, text
from pipeline.api.json_body import parse_object
from pipeline.api.overload import Overload
from pipeline.errors import InvalidRequest, ModelNotFound, NotFound
from pipeline.fleet.bodies import MAX_MODEL_ID, HeartbeatResponse
from pipeline.fleet.model_states import LOADING_STATES
from pipeline.fleet.records import AgentRecord, check_agent_id
from pipeline.observe.metrics import Metrics
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.interfaces import NodeHealth, NodeView
from stages.orchestrator.page_transfers import PageTransfers
from stages.orchestrator.prefix_moves import PrefixMoves, report
from stages.orchestrator.registry import Cordon, Registry
from stages.orchestrator.relay import Relay
from stages.orchestrator.router import Published, ScoreRouter
from stages.orchestrator.score import loaded as loaded_on
from stages.orchestrator.score import names_in
from stages.orchestrator.session_moves import SessionMoves

MAX_EVENTS = 1000
MAX_REPLICAS = 1000
# Of an agent's answer. Its keys of engines are left out, and what only orchestrators use.
SHOWN = (
    *("state", "reasons", "loaded_models", "cached_models", "max_models"),
    *("memory_free", "memory_available", "disk_free", "download_bytes_per_s", "compiling"),
    *("gpu_utilization", "gpu_memory_free"),  # null where no GPU is found
)
PLACEMENTS, CORDONS = "placements/", "cordons/"  # prefixes of keys in the store


class Placement(msgspec.Struct, frozen=True):
    """The value of `placements/MODEL` in the store: on how many agents the model is kept loaded."""

    model: str
    replicas: int


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    number: int
    at: float  # s since 1970
    kind: str  # "agent-joined", "agent-left", "agent-suspect", "agent-ready", "load", "load-failed", "unload", ...
    agent: str = ""
    model: str = ""
    text: str = ""


class EventLog:
    """The last `MAX_EVENTS` events."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)
        self._count = 0

    def add(self, kind: str, *, agent: str = "", model: str = "", text: str = "") -> None:
        """Something has happened."""
        self._count += 1
        self._events.append(
            FleetEvent(number=self._count, at=self._wall(), kind=kind, agent=agent, model=model, text=text[:500])
        )

    def after(self, number: int) -> list[FleetEvent]:
        """The events with a higher number, in order."""
        return [event for event in self._events if event.number > number]


class FleetApi:
    """One per orchestrator. `write(key, value)` puts a value into the store, None deletes it."""

    def __init__(
        self,
        identity: str,
        registry: Registry,
        router: ScoreRouter,
        relay: Relay,
        cold: ColdLoads,
        write: Callable[[str, bytes | None], Awaitable[None]],
        events: EventLog,
    ) -> None:
        self.placements: dict[str, Placement] = {}  # by key of the store
        self.published: Mapping[str, Published] = {}
        self.learn: Callable[[str], Awaitable[None]] = _learn_nothing  # looks whether a model has been published
        self.url_of: Callable[[AgentRecord], str] = lambda record: record.url
        self.pages: PageTransfers | None = None
        self.session_moves: SessionMoves | None = None
        self.prefix_moves: PrefixMoves | None = None
        self.is_leader = False
        self.is_store_up = True
        self.is_stopping = False
        self.in_flight: Callable[[], int] = lambda: 0  # requests
        self.max_in_flight = 1
        self._identity = identity
        self._registry = registry
        self._router = router
        self._relay = relay
        self._cold = cold
        self._write = write
        self._events = events
        self._overload, self._full_loads = Overload(), Overload()

    # ---------------------------------------------------------------- reading

    def readiness(self) -> dict[str, Any]:
        """Whether a request can be served: an agent answers, and has or can get a model; and there is room for one.

        While a model is ready its requests are served, however many wait for others.
        """
        ready = [one for one in self._registry.health() if one.health == "READY"]
        in_flight, waiting = self.in_flight(), self._cold.n_waiting
        is_overloaded = self._overload.observe(in_flight, self.max_in_flight)
        is_loading_full = self._full_loads.observe(waiting, self._cold.max_waiting)
        reason = ""
        if self.is_stopping:
            reason = "the orchestrator is being stopped"
        elif not ready:
            reason = "no agent answers"
        elif not self.published and not self._router.models():
            reason = "no model is published and none is loaded; publish one with `starling publish`"
        elif is_overloaded:
            reason = f"{in_flight} requests are in flight, of at most {self.max_in_flight}"
        elif is_loading_full and not self._router.models():
            reason = f"no model is ready, and {waiting} requests wait for one, of at most {self._cold.max_waiting}"
        return {
            "ready": not reason,
            "reason": reason,
            "agents": len(ready),
            "models": len(self._names()),
            "in_flight": in_flight,
            "overloaded": is_overloaded,
            "waiting": waiting,
            "waiting_full": is_loading_full,
        }

    def wanted(self) -> list[tuple[str, int]]:
        """The models and adapters that are placed, and the replicas of each."""
        return [(one.model, one.replicas) for one in self.placements.values()]

    def models(self) -> list[dict[str, Any]]:
        """The models that requests may name, as in OpenAI's API."""
        ready = self._router.models()
        return [self._model(name, ready.get(name, [])) for name in self._names()]

    def state(self) -> dict[str, Any]:
        """Everything that `starling fleet status` shows."""
        loads = self._cold.under_way
        return {
            "orchestrator": self._identity,
            "leader": self.is_leader,
            "store": "up" if self.is_store_up else "down",
            "agents": [self._agent(name) for name in self._agent_ids()],
            "models": self.models(),
            "loads": [{"model": load.model, "agent": load.agent_id, "waiting": load.n_waiting} for load in loads],
            "moves": dict(self._relay.moves),
            "estimates": msgspec.to_builtins(self._router.rates.errors()),
        }

    def events(self, after: str) -> dict[str, Any]:
        """The events after a number. Raises `InvalidRequest`."""
        if not (after.isascii() and after.isdigit() and len(after) <= 18):
            raise InvalidRequest(f"after is {after[:40]!r}; send the number of an event", "after")
        return {"events": [msgspec.to_builtins(event) for event in self._events.after(int(after))]}

    def why(self, request_id: str) -> dict[str, Any]:
        """The choices made for a request; of an agent, what its drain did with prefixes. Raises `NotFound`."""
        decision = self._router.decisions.find(request_id)
        if decision is None:
            moves = self.prefix_moves.why(request_id) if self.prefix_moves is not None else None
            if moves is not None:
                return {"agent_id": request_id, "prefixes": report(moves)}
            raise NotFound(
                f"this orchestrator has routed no request {request_id[:80]!r} lately, and has drained no such agent; "
                "X-Starling-Request of an answer is its id"
            )
        found: dict[str, Any] = msgspec.to_builtins(decision)
        return found

    def sample(self, metrics: Metrics) -> None:
        """Set the metrics that are read and not counted."""
        health = [one.health for one in self._registry.health()]
        for state in ("READY", "SUSPECT", "UNKNOWN"):
            metrics.set("starling_fleet_agents", health.count(state), state.lower())
        metrics.set("starling_fleet_leader", self.is_leader)
        metrics.set("starling_fleet_store_up", self.is_store_up)
        metrics.set("starling_fleet_continued_tokens_total", self._relay.continued_tokens)
        metrics.set("starling_fleet_replayed_texts_total", self._relay.replayed_texts)
        for cause, count in self._relay.moves.items():
            metrics.set("starling_fleet_moves_total", count, cause)
        if self.pages is not None:
            for outcome in ("sent", "computed", "failed"):
                metrics.set("starling_fleet_page_transfers_total", self.pages.outcomes[outcome], outcome)
            metrics.set("starling_fleet_page_bytes_total", self.pages.nbytes)
        if self.session_moves is not None:
            for outcome in ("moved", "failed"):
                metrics.set("starling_fleet_session_moves_total", self.session_moves.outcomes[outcome], outcome)
        if self.prefix_moves is not None:
            for outcome in ("sent", "held", "skipped", "failed"):
                metrics.set("starling_fleet_prefix_moves_total", self.prefix_moves.outcomes[outcome], outcome)
            metrics.set("starling_fleet_prefix_bytes_total", self.prefix_moves.nbytes)
        metrics.set("starling_requests_in_flight", self.in_flight())
        metrics.set("starling_fleet_cold_waiting", self._cold.n_waiting)
        metrics.set("starling_fleet_loads_total", self._cold.done, "done")
        metrics.set("starling_fleet_loads_total", self._cold.failed, "failed")
        errors = self._router.rates.errors()
        metrics.set("starling_fleet_estimates_total", errors.count)
        metrics.set("starling_fleet_estimate_error_seconds_total", errors.error_s)

    # ---------------------------------------------------------------- changing

    async def change(self, op: str, body: bytes, content_type: str) -> dict[str, Any]:
        """Carry out `place` or `cordon`. Raises `StarlingError`."""
        fields = parse_object(body, content_type)
        return await (self._place(fields) if op == "place" else self._cordon(fields))

    async def _place(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = read_fields(
            fields,
            {"model": text(MAX_MODEL_ID, empty=False), "replicas": integer(0, MAX_REPLICAS)},
            required=("model", "replicas"),
        )
        model, replicas = values["model"], values["replicas"]
        key, placed = PLACEMENTS + slug(model), Placement(model, replicas)
        if model not in self._names():
            await self.learn(model)
        # The placement of a model that is published no more ends as any other one.
        if model not in self._names() and (replicas or key not in self.placements):
            raise ModelNotFound(f"there is no model {model!r}; `starling fleet models` lists them", "model")
        await self._write(key, msgspec.json.encode(placed) if replicas else None)
        self._events.add("placed", model=model, text=f"{replicas} replicas wanted")
        return {"model": model, "replicas": replicas, "ready": len(self._router.models().get(model, []))}

    async def _cordon(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = read_fields(
            fields,
            {"agent": text(63, empty=False), "cordoned": flag, "drain": flag},
            required=("agent", "cordoned"),
        )
        agent, cordoned, drain = values["agent"], values["cordoned"], values.get("drain", False)
        if reason := check_agent_id(agent):
            raise InvalidRequest(f"agent is {agent!r}; {reason}", "agent")
        if drain and not cordoned:
            raise InvalidRequest("drain is true and cordoned is false; an agent that drains is cordoned", "drain")
        # An agent that has left may come back: its cordon can be ended.
        if self._registry.find(agent) is None and (cordoned or self._registry.cordon(agent) is None):
            raise NotFound(f"there is no agent {agent!r}; `starling fleet agents` lists them", "agent")
        value = msgspec.json.encode(Cordon(is_draining=drain)) if cordoned else None
        await self._write(CORDONS + agent, value)
        self._events.add("draining" if drain else "cordoned" if cordoned else "uncordoned", agent=agent)
        return {"agent": agent, "cordoned": cordoned, "drain": drain}

    # ---------------------------------------------------------------- parts

    def _names(self) -> list[str]:
        """Models that requests may name: published, loaded, or on an agent's disk."""
        names = set(self.published)
        for view in self._router.table:
            names.update(names_in(view.details))
            names |= {name for one in view.details.cached_models if one.is_complete for name in one.names}
        return sorted(names, key=sort_key)

    def _model(self, name: str, ready: list[str]) -> dict[str, Any]:
        known = self.published.get(name)
        base, colon, adapter = name.partition(":")
        loaded = [one for view in self._router.table if (one := loaded_on(view.details, name)) is not None]
        of_base = [one for view in self._router.table for one in view.details.loaded_models if one.model_id == base]
        digest = known.digest if known else next((one.digest for one in of_base), "")
        placement = next((one for one in self.placements.values() if one.model == name), None)
        body: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": known.at if known else 0,
            "owned_by": "starling",
            "engine": self._engine_of(base),
            "ready": bool(ready),
            "agents": ready,
            "loading": sum(one.model_state in LOADING_STATES for one in loaded),
            "digest": digest,
            "bytes": known.nbytes if known else max((one.bytes for one in loaded), default=0),
            "replicas": placement.replicas if placement else 0,
        }
        if not colon:
            return body
        digests = (one.digest for model in of_base for one in model.adapters if one.name == adapter)
        adapter_digest = known.adapter_digest if known else next(digests, "")
        return body | {"parent": base, "root": base, "adapter_digest": adapter_digest}

    def _engine_of(self, name: str) -> str:
        """The program that computes a model. Only answers of `starling` are the same each time."""
        for view in self._router.table:
            for one in view.details.loaded_models:
                if one.model_id == name:
                    return one.engine
            for cached in view.details.cached_models:
                if name in cached.names:
                    return cached.engine
        return "starling"

    def _stop_waits_for(self, agent_id: str, health: NodeHealth, view: NodeView | None, left: Mapping[str, int]) -> str:
        """Why the agent should not be stopped now: what would be lost, or computed again; "": it may be."""
        if view is None or health.health != "READY":
            return "its answer: what it has is not known"
        if view.may_start:
            return "a drain: it gets requests (starling fleet drain)"
        if not view.is_draining:
            return "a drain: its sessions stay (starling fleet drain)"
        counts = {"requests": left["streams"], "sessions": left["sessions"], "prefixes": left["prefixes"]}
        waits_for = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if not waits_for and not self._registry.is_idle(agent_id):
            return "another report of its engines, which are up to two seconds old"
        return waits_for

    def _agent_ids(self) -> list[str]:
        return [one.agent_id for one in self._registry.health()]

    def _agent(self, agent_id: str) -> dict[str, Any]:
        health = next(one for one in self._registry.health() if one.agent_id == agent_id)
        record = self._registry.find(agent_id)
        cordon = self._registry.cordon(agent_id)
        view = next((one for one in self._router.table if one.agent_id == agent_id), None)
        models = view.details.loaded_models if view is not None else ()
        reported = sum(one.running + one.vllm_queue_length for one in models)
        left = {
            "streams": max(self._router.under_way(agent_id), reported),
            "sessions": sum(max(one.sessions, one.sessions_moving) for one in models),
            "prefixes": sum(one.prefixes_left for one in models),
        }
        return {
            "agent_id": agent_id,
            "url": self.url_of(record) if record else "",
            "incarnation": record.incarnation if record else "",
            "health": health.health,
            "reason": health.reason,
            "age_s": round(health.age_s, 3) if health.age_s < 1e9 else None,
            "cordoned": cordon is not None,
            "draining": bool(cordon and cordon.is_draining),
            "under_way": self._router.under_way(agent_id),
            "left": left,
            "may_stop": not (waits_for := self._stop_waits_for(agent_id, health, view, left)),
            "stop_waits_for": waits_for,
            **(_details(view.details) if view is not None else {}),
        }


async def _learn_nothing(model: str) -> None:
    """There is no catalog."""


def _details(details: HeartbeatResponse) -> dict[str, Any]:
    """What an agent answered, without the keys of its engines."""
    shown: dict[str, Any] = msgspec.to_builtins(details)
    for one in shown["loaded_models"]:
        one.pop("engine_key", None)
    return {name: shown.get(name) for name in SHOWN}


def slug(model: str) -> str:
    """A model's name as a part of a key."""
    return model.replace("/", "--")
