"""Which models and adapters may leave an agent, and which one first: for other models, for its memory, and after a time
without requests.

    stays    of each placed model and adapter as many copies as it has replicas (placement.py), what a load at the agent
             brings, and the model of each such adapter
    idle     ready, and without requests of any orchestrator
    first    of the idle ones that do not stay the one that was used longest ago

Copies of a placed model beyond its replicas leave as others do.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from pipeline.api.adapter_names import base_of
from pipeline.fleet.model_states import HELD_STATES
from stages.orchestrator.adapter_hosts import Published, has_other_version
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.last_uses import LastUses
from stages.orchestrator.placement import copies_that_stay
from stages.orchestrator.score import loaded


class Eviction:
    """One per orchestrator. `turns`: numbers that grow; `under_way`: its requests by agent and model."""

    def __init__(self, turns: Iterator[int], under_way: Counter[tuple[str, str]]) -> None:
        self.uses = LastUses(turns)
        self.placements: Callable[[], Iterable[tuple[str, int]]] = tuple  # models and adapters, and their replicas
        self.loads_at: Callable[[str], Collection[str]] = lambda agent_id: ()  # what is being loaded at an agent
        self._under_way = under_way
        self._table: Mapping[str, NodeView] = {}
        self._copies: dict[str, set[str]] | None = None  # those of placements, by agent; None: to be found

    def update(self, table: Mapping[str, NodeView]) -> None:
        """The agents have answered, or the placements have changed."""
        self._table, self._copies = table, None
        self.uses.observe(table.values())

    def stays(self, agent_id: str) -> set[str]:
        """The names of the models and adapters that do not leave the agent, loaded or not."""
        if self._copies is None:
            self._copies = copies_that_stay(self.placements(), self._table.values())
        names = {*self._copies.get(agent_id, ()), *self.loads_at(agent_id)}
        return names | {base_of(name) for name in names}

    def room_for(self, view: NodeView, model: str, published: Published | None) -> str | None:
        """The model that leaves for another one: "" if there is room, None if none may leave."""
        if has_other_version(view.details, model, published):
            base = base_of(model)  # which is back at once, in the published version
            return base if base in self._idle(view) else None
        held = [one for one in view.details.loaded_models if one.model_state in HELD_STATES]
        if len(held) < (view.details.max_models or len(held) + 1):
            return ""
        return self.idle_model(view.agent_id, ()) or None

    def idle_model(self, agent_id: str, besides: Collection[str]) -> str:
        """The model that leaves the agent when another one needs its memory; "" if none may."""
        view = self._table.get(agent_id)
        if view is None:
            return ""
        kept = {*besides, *self.stays(agent_id)}
        return next((name for name in self._idle(view) if name not in kept), "")

    def remaining(self, agent_id: str, besides: Collection[str]) -> frozenset[str]:
        """The other models that are on the agent when all that may leave have left."""
        view = self._table.get(agent_id)
        if view is None:
            return frozenset()
        held = {one.model_id for one in view.details.loaded_models if one.model_state in HELD_STATES}
        stays = self.stays(agent_id)
        return frozenset(held.difference(besides, (name for name in self._idle(view) if name not in stays)))

    def idle_adapter(self, agent_id: str, model: str, besides: Collection[str]) -> str:
        """The adapter of the same model that leaves the agent for MODEL:ADAPTER: that which was used longest ago.

        "": all others stay, are loading, or have requests.
        """
        kept = {*besides, *self.stays(agent_id)}
        ready = [name for name in self._adapters(agent_id, model, is_ready=True) if name not in kept]
        others = [name for name in ready if not self.uses.has_requests(agent_id, name)]
        return min(others, key=lambda name: (self.uses.of(agent_id, name), name), default="")

    def may_adapter_leave(self, agent_id: str, model: str) -> bool:
        """Whether another adapter of the same model may leave the agent, now or when its requests have ended."""
        stays = self.stays(agent_id)
        return any(name not in stays for name in self._adapters(agent_id, model))

    def outdated_model(self, agent_id: str, model: str, published: Published | None) -> str:
        """The model of an adapter, if the agent has another version of it than the published one; else ""."""
        view = self._table.get(agent_id)
        return base_of(model) if view is not None and has_other_version(view.details, model, published) else ""

    def _adapters(self, agent_id: str, model: str, *, is_ready: bool = False) -> list[str]:
        """The other adapters of the same model on the agent, or those that are ready."""
        view = self._table.get(agent_id)
        running = loaded(view.details, base_of(model)) if view is not None else None
        found = [one for one in running.adapters if one.is_ready or not is_ready] if running is not None else []
        return [name for one in found if (name := f"{base_of(model)}:{one.name}") != model]

    def _idle(self, view: NodeView) -> list[str]:
        """The idle models, the one that was used longest ago first."""
        idle = [
            one.model_id
            for one in view.details.loaded_models
            if (one.model_state == "READY" and not one.silent_s)
            and not (one.running or one.vllm_queue_length or self._under_way[view.agent_id, one.model_id])
        ]
        return sorted(idle, key=lambda name: (self.uses.of(view.agent_id, name), name))
