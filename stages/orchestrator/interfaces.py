"""The two interfaces of the orchestrator: who is in the fleet, and where a request goes.

They know agents by id.  `Registry` and `ScoreRouter` implement them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.records import AgentRecord

Health = Literal["READY", "SUSPECT", "UNKNOWN"]


class NodeHealth(NamedTuple):
    """What the last poll of an agent found."""

    agent_id: str
    health: Health  # UNKNOWN: it has not answered yet
    reason: str  # "" if READY
    age_s: float  # of its last answer; inf without one


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the routing table: an agent that has answered, as the router uses it."""

    agent_id: str
    url: str
    details: HeartbeatResponse
    health: Health = "READY"
    may_start: bool = True  # false: cordoned or draining: no new requests, no new models
    reason: str = ""  # why not
    is_draining: bool = False  # what it has is moved to other agents
    silent_s: float = 0.0  # since its last answer; 0 if READY
    draining_since: float = 0.0  # s of this process's clock, which tells one drain of an agent from the next


RoutingTable = Sequence[NodeView]


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What routing uses of a request. It has no text: `blocks` are hashes."""

    request_id: str
    model: str
    prompt_bytes: int = 0
    blocks: tuple[int, ...] = ()  # chained hashes of the prompt's full blocks, see prefixes.py
    pinned: str = ""  # the agent that has its session or answer, as far as is known; "": any
    is_held: bool = False  # only an agent that has it can serve it, also one that is cordoned; not pinned: any may
    begins: str = ""  # name of the session that it begins: every orchestrator chooses the same agent; "": none
    has_moved: bool = False  # the first turn after its session's move: more than its prompt may be computed
    has_context: bool = False  # the conversation before it follows its body: an engine must take that
    excluded: frozenset[str] = frozenset()  # agents that have just failed it
    version: str = ""  # the version that has answered already, as `version_of` or `text_kind_of` names it; "": any


class NodeManager(ABC):
    """Who is in the fleet."""

    @abstractmethod
    async def register_node(self, node: AgentRecord) -> None:
        """Add an agent, or replace it by its next incarnation."""

    @abstractmethod
    async def discover_nodes(self) -> list[AgentRecord]:
        """The agents that are registered."""

    @abstractmethod
    async def health_check_nodes(self) -> list[NodeHealth]:
        """Poll all agents at once; what was found."""


class RequestRouter(ABC):
    """Where a request goes."""

    @abstractmethod
    async def route_request(self, request: RoutedRequest) -> str:
        """The id of the agent that serves the request. Raises `ModelUnavailable`, `Overloaded`."""

    @abstractmethod
    def update_routing_table(self, table: RoutingTable) -> None:
        """Route by this table from now on."""
