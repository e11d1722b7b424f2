"""Which agents should load which models, so that each placement has its replicas, and which copies of these stay.

An agent that does not answer counts as having its models for a while: one that has ended leaves with its lease, and a
copy that were loaded for a late answer would be one too many.  Pure; the loads are the leader's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from pipeline.api.adapter_names import base_of
from pipeline.fleet.model_states import HELD_STATES
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.score import loaded

SILENT_S = 15.0  # for which an agent that does not answer counts as having its models: three leases

Agents = Callable[[str], Collection[str]]  # ids, by model


class Load(NamedTuple):
    """A model that an agent should load."""

    model: str
    agent_id: str


def _is_host(view: NodeView, model: str) -> bool:
    return _state(view, base_of(model)) in HELD_STATES


def _room_for(view: NodeView, model: str) -> str | None:
    return "" if not view.details.max_models or _load(view)[0] < view.details.max_models else None


def _none(model: str) -> Collection[str]:
    return ()


def copies(model: str, table: Iterable[NodeView], loading: Agents = _none) -> list[NodeView]:
    """The agents whose copies of the model count for a placement. `loading`: those that load it for this process."""
    begun = loading(model)
    return [
        view
        for view in table
        if view.may_start
        and (view.health == "READY" or view.silent_s < SILENT_S)
        and (_state(view, model) in HELD_STATES or view.agent_id in begun)
    ]


def copies_that_stay(wanted: Iterable[tuple[str, int]], table: Collection[NodeView]) -> dict[str, set[str]]:
    """By agent, the placed models and adapters that do not leave it: of each (model, replicas) so many copies.

    First those that are ready, then those of agents that take requests and answer, then by id: so every orchestrator
    spares the same ones.
    """
    found: dict[str, set[str]] = {}
    for model, replicas in wanted:
        held = [view for view in table if _state(view, model) in HELD_STATES]
        held.sort(
            key=lambda view: (
                _state(view, model) != "READY",
                not view.may_start,
                view.health != "READY",
                view.agent_id,
            )
        )
        for view in held[:replicas]:
            found.setdefault(view.agent_id, set()).add(model)
    return found


def missing_loads(
    wanted: Iterable[tuple[str, int]],
    table: list[NodeView],
    is_host: Callable[[NodeView, str], bool] = _is_host,
    room_for: Callable[[NodeView, str], str | None] = _room_for,
    loading: Agents = _none,
    failed: Agents = _none,
) -> list[Load]:
    """The loads that bring each (model, replicas) to its number, at most one for each agent.

    An agent that has the files comes first, then one with more room; then one that another model must leave.  An agent
    whose engine for the model has failed is the last choice, and one that has just failed to load it is none.
    `is_host`: whether an agent has the model of an adapter in the right version.  `room_for`: the model that leaves an
    agent for another one; "": none must, None: none may.  `loading`, `failed`: agents that load a model now, or have
    just failed to.
    """
    busy: set[str] = set()
    loads = []
    for model, replicas in wanted:
        n_copies = len(copies(model, table, loading))
        if n_copies >= replicas:
            continue
        base, others = base_of(model), {*loading(model), *failed(model)}
        # An adapter needs no place of its own where its model is.
        hosts = [view.agent_id for view in table if base != model and is_host(view, model)]
        leaving = {view.agent_id: "" if view.agent_id in hosts else room_for(view, model) for view in table}
        candidates = [
            view
            for view in table
            if _state(view, model) not in HELD_STATES
            and view.agent_id not in others
            and view.may_start
            and view.health == "READY"
            and not view.details.files_silent_s
            and (view.details.serves_adapters or base == model)
            # One that has another version of the model has its place, which that leaves when it is idle.
            and (leaving[view.agent_id] is not None or (base != model and _is_host(view, model)))
        ]
        candidates.sort(
            key=lambda view: (
                _state(view, base) == "FAILED",
                leaving[view.agent_id] != "",
                view.agent_id not in hosts,
                not _is_cached(view, base),
                _load(view),
            )
        )
        for view in candidates:
            if n_copies >= replicas:
                break
            if view.agent_id not in busy:
                busy.add(view.agent_id)
                n_copies += 1
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
        have = [view for view in table if _state(view, model) in HELD_STATES]
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


def _is_cached(view: NodeView, model: str) -> bool:
    return any(model in one.names and one.is_complete for one in view.details.cached_models)


def _load(view: NodeView) -> tuple[int, str]:
    held = [one for one in view.details.loaded_models if one.model_state not in ("FAILED", "UNLOADED")]
    return len(held), view.agent_id
