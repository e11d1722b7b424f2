"""Agents as their heartbeats describe them."""

from __future__ import annotations

from typing import Any

from pipeline.fleet.bodies import CachedModel, HeartbeatResponse, LoadedModel
from stages.orchestrator.interfaces import NodeView, RoutedRequest
from stages.orchestrator.policies import Order, by_score
from stages.orchestrator.router import Published, ScoreRouter
from stages.orchestrator.score import Weights

MODEL = "demo"
DIGEST = "d" * 64
PUBLISHED = {MODEL: Published(DIGEST, 100_000_000), "other": Published("e" * 64, 1_000_000_000)}


def engine(name: str = MODEL, **fields: Any) -> LoadedModel:
    """A model that an agent runs."""
    given = {
        "model_state": "READY",
        "cache_level": "CPU_RESIDENT",
        "engine_incarnation": "1",
        "digest": DIGEST,
        "kv_type": "f16",
        "numerics": 1,
        "bytes": 100_000_000,
        **fields,
    }
    return LoadedModel(model_id=name, **given)


def cached(name: str = MODEL, **fields: Any) -> CachedModel:
    """A model whose files an agent has."""
    given = {
        "digest": PUBLISHED[name].digest,
        "names": (name,),
        "cache_level": "NVME_CACHED",
        "bytes": PUBLISHED[name].nbytes,
        "is_complete": True,
        **fields,
    }
    return CachedModel(**given)


def heartbeat(agent_id: str, *engines: LoadedModel, **fields: Any) -> HeartbeatResponse:
    """What an agent answers."""
    given = {"incarnation": "1", "state": "IDLE", "max_models": 2, **fields}
    return HeartbeatResponse(agent_id=agent_id, loaded_models=engines, **given)


def view(
    agent_id: str,
    *engines: LoadedModel,
    may_start: bool = True,
    health: Any = "READY",
    silent_s: float = 0.0,
    **fields: Any,
) -> NodeView:
    """A row of the routing table."""
    return NodeView(
        agent_id=agent_id,
        url=f"http://{agent_id}",
        details=heartbeat(agent_id, *engines, **fields),
        may_start=may_start,
        reason="" if may_start else "cordoned",
        health=health,
        silent_s=silent_s,
    )


def router(*views: NodeView, max_per_agent: int = 100, order: Order = by_score) -> ScoreRouter:
    """A router with that table."""
    made = ScoreRouter(Weights(), max_per_agent, PUBLISHED.get, lambda: 0.0, order=order)
    made.update_routing_table(views)
    return made


def request(name: str = "req-1", model: str = MODEL, **fields: Any) -> RoutedRequest:
    """A request as routing sees it."""
    return RoutedRequest(request_id=name, model=model, **fields)
