"""Which agents should load which models, so that each placement has its replicas. Pure; run by the leader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pipeline.api.adapter_names import base_of
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.score import loaded

HELD = ("READY", "DOWNLOADING", "LOADING_TO_GPU")  # states of models that take an engine


class Load(NamedTuple):
    """A model that an agent should load."""

    model: str
    agent_id: str


def _is_host(view: NodeView, model: str) -> bool:
    return _state(view, base_of(model)) in HELD


def missing_loads(
    wanted: Iterable[tuple[str, int]], table: list[NodeView], is_host: Callable[[NodeView, str], bool] = _is_host
) -> list[Load]:
    """The loads that bring each (model, replicas) to its number, at most one for each agent.

    An agent that has the files comes first, then one with more room.  An agent whose engine for the model has failed is
    the last choice.  What runs on agents without a placement stays: it leaves when another model needs its place.
    `is_host`: whether an agent has the model of an adapter in the right version.
    """
    busy: set[str] = set()
    loads = []
    for model, replicas in wanted:
        have = [view for view in table if _state(view, model) in HELD]
        usable = [view for view in have if view.may_start and view.health == "READY"]
        base = base_of(model)
        # An adapter needs no place of its own where its model is.
        hosts = [view.agent_id for view in table if base != model and is_host(view, model)]
        candidates = [
            view
            for view in table
            if view not in have
            and view.may_start
            and view.health == "READY"
            and not view.details.files_silent_s
            and (view.details.serves_adapters or base == model)
            # One that has another version of the model has its place, which that leaves when it is idle.
            and (view.agent_id in hosts or _has_room(view) or (base != model and _is_host(view, model)))
        ]
        candidates.sort(
            key=lambda view: (
                _state(view, base) == "FAILED",
                view.agent_id not in hosts,
                base != model and view.agent_id not in hosts and _is_host(view, model),
                not _is_cached(view, base),
                _load(view),
            )
        )
        for view in candidates:
            if len(usable) >= replicas:
                break
            if view.agent_id not in busy:
                busy.add(view.agent_id)
                usable.append(view)
                loads.append(Load(model, view.agent_id))
    return loads


def stalled_loads(
    wanted: Iterable[tuple[str, int]], table: list[NodeView], has_told: Callable[[str, str], bool]
) -> list[Load]:
    """Downloads of placed models that wait for signed URLs, and that no load of this orchestrator has asked for.

    The orchestrator that did has ended, or was another leader.  Agents beyond the wanted number are left alone.
    """
    loads = []
    for model, replicas in wanted:
        have = [view for view in table if _state(view, model) in HELD]
        waiting = [
            Load(model, view.agent_id)
            for view in have
            if view.may_start
            and view.health == "READY"
            and any(one.model_id == base_of(model) for one in view.details.wanted_urls)
            and not has_told(view.agent_id, base_of(model))
        ]
        loads += waiting if len(have) <= replicas else []
    return loads


def _state(view: NodeView, model: str) -> str:
    found = loaded(view.details, model)
    return found.model_state if found is not None else ""


def _has_room(view: NodeView) -> bool:
    return not view.details.max_models or _load(view)[0] < view.details.max_models


def _is_cached(view: NodeView, model: str) -> bool:
    return any(model in one.names and one.is_complete for one in view.details.cached_models)


def _load(view: NodeView) -> tuple[int, str]:
    held = [one for one in view.details.loaded_models if one.model_state not in ("FAILED", "UNLOADED")]
    return len(held), view.agent_id
