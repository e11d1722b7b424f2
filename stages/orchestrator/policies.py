"""The order of the agents that have a model ready, by `fleet.orchestrator.routing`.

    score        the lowest estimate of the time to the first token (score.py)
    least-queue  the fewest requests
    round-robin  the one that was chosen longest ago
    random       any

The other policies exist to be compared with the score.  Where a model must be loaded first, the score decides.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Literal

from stages.orchestrator.decisions import AgentScore

Routing = Literal["score", "least-queue", "round-robin", "random"]
Rank = tuple[float, int, int, str]
# The agent with the lowest rank is chosen. The mapping: by agent, the turn in which it was chosen last.
Order = Callable[[AgentScore, Mapping[str, int]], Rank]


def by_score(one: AgentScore, last_turn: Mapping[str, int]) -> Rank:
    """Estimates within a millisecond are equal: fewer requests decide, then the time since the last one."""
    return (round(one.score_s, 3), one.ahead, last_turn.get(one.agent_id, -1), one.agent_id)


def by_name(name: str) -> Order:
    """The same agent for a name at every orchestrator, whatever the queues are; names spread over the agents.

    If agents join or leave, only the names of these go to others (rendezvous hashing).
    """

    def rank(one: AgentScore, last_turn: Mapping[str, int]) -> Rank:
        digest = hashlib.sha256(f"{name}\0{one.agent_id}".encode("utf-8", "surrogatepass")).digest()
        return (0.0, int.from_bytes(digest[:8], "big"), 0, one.agent_id)

    return rank


def order_of(routing: Routing, draw: Callable[[], float] = random.random) -> Order:
    """The order of a policy. `draw`: a random number from 0 to 1."""
    return {
        "score": by_score,
        "least-queue": lambda one, last_turn: (0.0, one.ahead, last_turn.get(one.agent_id, -1), one.agent_id),
        "round-robin": lambda one, last_turn: (0.0, 0, last_turn.get(one.agent_id, -1), one.agent_id),
        "random": lambda one, last_turn: (draw(), 0, 0, one.agent_id),
    }[routing]
