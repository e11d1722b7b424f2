"""When each model and adapter was used last, for the choice of what leaves an agent. Pure.

Uses are counted in turns: of this orchestrator's requests as they are sent, and of all other requests as the agents
report them, within two seconds.  What becomes ready counts as used: who loaded it needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from stages.orchestrator.interfaces import NodeView


class _Report(NamedTuple):
    """What an agent says of a model or adapter."""

    running: int  # requests, or sequences
    taken: int  # since its engine started


Key = tuple[str, str]  # agent, and model or MODEL:ADAPTER


class LastUses:
    """One per orchestrator. `turns`: numbers that grow."""

    def __init__(self, turns: Iterator[int]) -> None:
        self._turns = turns
        self._last: dict[Key, int] = {}
        self._reports: dict[Key, _Report] = {}
        self._under_way: Counter[Key] = Counter()  # requests of this orchestrator that name an adapter

    def of(self, agent_id: str, name: str) -> int:
        """The turn of the last use; -1: none is known."""
        return self._last.get((agent_id, name), -1)

    def begin(self, agent_id: str, *names: str) -> None:
        """A request of this orchestrator is sent to an agent: for a model, and for the adapter that it names."""
        turn = next(self._turns)
        for name in names:
            self._last[agent_id, name] = turn
            if ":" in name:
                self._under_way[agent_id, name] += 1

    def end(self, agent_id: str, name: str) -> None:
        """One has ended there."""
        if ":" in name:
            self._under_way[agent_id, name] -= 1
            if self._under_way[agent_id, name] <= 0:
                del self._under_way[agent_id, name]

    def has_requests(self, agent_id: str, adapter: str) -> bool:
        """Whether an adapter, MODEL:ADAPTER, has requests: of this orchestrator, or of others as the agent says."""
        key = (agent_id, adapter)
        return bool(self._under_way[key]) or (key in self._reports and self._reports[key].running > 0)

    def observe(self, table: Collection[NodeView]) -> None:
        """The agents have answered. Forgets agents that have left, and adapters that are not ready."""
        agents = {view.agent_id for view in table}
        reports = {}
        for view in table:
            for model in view.details.loaded_models:
                reports[view.agent_id, model.model_id] = _Report(model.running, model.requests)
                for one in model.adapters:
                    if one.is_ready:
                        reports[view.agent_id, f"{model.model_id}:{one.name}"] = _Report(one.running, one.requests)
        used = [key for key, report in reports.items() if self._is_used(key, report)]
        self._last = {
            key: turn for key, turn in self._last.items() if key[0] in agents and (":" not in key[1] or key in reports)
        }
        # Those of one look stay in the order that is known: this orchestrator may have sent them itself.
        for key in sorted(used, key=lambda key: self._last.get(key, -1)):
            self._last[key] = next(self._turns)
        self._reports = reports

    def _is_used(self, key: Key, report: _Report) -> bool:
        known = self._reports.get(key)
        if known is None:  # an adapter that has become ready, or an orchestrator that has just started
            return ":" in key[1] and key not in self._last
        return report.running > 0 or report.taken > known.taken or 0 < report.taken < known.taken
