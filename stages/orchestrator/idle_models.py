"""Which loaded models have no requests, and for how long: those that leave after `fleet.orchestrator.unload_idle_ms`.

An agent reports what its engines compute, what waits, and how many sequences they have taken so far, so that requests
of other orchestrators, and those between two polls, count as well.  The time of an engine begins when this orchestrator
first sees it.  Which models stay all the same, eviction.py says.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from stages.orchestrator.interfaces import NodeView


class Loaded(NamedTuple):
    """A model on an agent."""

    agent_id: str
    model: str


class _Seen(NamedTuple):
    incarnation: str
    requests: int
    since: float  # s of the clock, when it was last seen to work


class IdleModels:
    """One per orchestrator. `clock` is monotonic, s. `under_way(agent, model)`: requests that it has sent there."""

    def __init__(self, clock: Callable[[], float], under_way: Callable[[str, str], int]) -> None:
        self._clock = clock
        self._under_way = under_way
        self._seen: dict[Loaded, _Seen] = {}

    def observe(self, table: Collection[NodeView]) -> None:
        """The agents have answered. Forgets the models that are no longer ready."""
        now, found = self._clock(), {}
        for view in table:
            for one in view.details.loaded_models:
                if one.model_state != "READY":
                    continue
                name = Loaded(view.agent_id, one.model_id)
                is_busy = one.running or one.vllm_queue_length or one.silent_s or self._under_way(*name)
                known = self._seen.get(name)
                if known is None or is_busy or known[:2] != (one.engine_incarnation, one.requests):
                    known = _Seen(one.engine_incarnation, one.requests, now)
                found[name] = known
        self._seen = found

    def due(self, table: Collection[NodeView], idle_s: float, stays: Callable[[str], Collection[str]]) -> list[Loaded]:
        """The models that have been idle for `idle_s`, but for those that stay. One for each agent at most.

        `stays`: names, by agent. Of an agent that does not answer nothing is known.
        """
        now = self._clock()
        answering = {view.agent_id for view in table if view.health == "READY"}
        idle = [
            (seen.since, name)
            for name, seen in self._seen.items()
            if name.agent_id in answering and now - seen.since >= idle_s and name.model not in stays(name.agent_id)
        ]
        first: dict[str, Loaded] = {}
        for _, name in sorted(idle):
            first.setdefault(name.agent_id, name)
        return list(first.values())
