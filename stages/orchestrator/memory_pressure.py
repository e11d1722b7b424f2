"""Which idle models leave agents that are short of memory, before the kernel ends a process there.

An agent is short of memory from two successive answers with less than `LOW` of it available until one with `HIGH`: what
an unloaded model has had is back by then.  With each answer meanwhile one model may leave, the one that has been idle
longest.  Models with requests stay, and those of eviction.py.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from pipeline.fleet.bodies import HeartbeatResponse
from stages.orchestrator.idle_models import IdleModels, Loaded
from stages.orchestrator.interfaces import NodeView

LOW = 0.05  # of the memory of the host, or of its control group; an agent ends its standby engines at the same
HIGH = 0.08
ANSWERS = 2  # in a row below LOW: one alone may be a file that is being read
IDLE_S = 10.0  # a model that was used later is likely to be used again, and would be loaded again


class _Seen(NamedTuple):
    details: HeartbeatResponse  # the last answer
    n_low: int  # answers in a row below LOW
    is_short: bool


class MemoryPressure:
    """One per orchestrator; the leader asks it."""

    def __init__(self, idle: IdleModels) -> None:
        self._idle = idle
        self._seen: dict[str, _Seen] = {}

    def due(self, table: Collection[NodeView], stays: Callable[[str], Collection[str]]) -> list[Loaded]:
        """The models that should leave now, one for each agent that is short of memory and has answered anew.

        Call it after `IdleModels.observe`. `stays`: names of models that stay, by agent.
        """
        found: dict[str, _Seen] = {}
        short = []
        for view in table:
            before = self._seen.get(view.agent_id)
            if view.health != "READY" or (before is not None and before.details is view.details):
                if before is not None:
                    found[view.agent_id] = before
                continue
            part = view.details.memory_available
            n_low = (before.n_low if before is not None else 0) + 1 if part < LOW else 0
            was_short = before is not None and before.is_short and part < HIGH
            found[view.agent_id] = _Seen(view.details, n_low, was_short or n_low >= ANSWERS)
            if found[view.agent_id].is_short:
                short.append(view)
        self._seen = found
        return self._idle.due(short, IDLE_S, stays) if short else []
