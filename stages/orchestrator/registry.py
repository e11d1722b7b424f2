"""The agents of the fleet: who is registered, what each of them answered last, and which may get new work.

    registered   its record is in the store (the stage watches it); it leaves when its lease ends
    READY        it has answered the last poll, as the incarnation that is registered
    SUSPECT      it has not; it gets requests only where no other agent can serve them
    cordoned     gets no new requests and no new models; its streams go on.  draining: they are moved, too

The poll is injected.  Without sockets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from pipeline.errors import StarlingError
from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.model_states import LOADING_STATES
from pipeline.fleet.records import VERSION, AgentRecord
from stages.orchestrator.interfaces import Health, NodeHealth, NodeManager, NodeView

MAX_AGENTS = 1000  # further ones are not registered
UNANSWERED_S = 3.0  # for the first answer of an agent; until then it may have any session
REPORTED_S = 3.0  # for which an agent that drains has named no session: what it says of its engines may be old
Poll = Callable[[AgentRecord], Awaitable[HeartbeatResponse]]


class Cordon(msgspec.Struct, frozen=True):
    """The value of `cordons/AGENT_ID` in the store."""

    is_draining: bool = False
    since: float = 0.0  # s since 1970


class _Agent:
    """One agent."""

    def __init__(self, record: AgentRecord, now: float) -> None:
        self.record = record
        self.since = now  # when it was registered here, s of the clock
        self.details: HeartbeatResponse | None = None
        self.answered_at = -math.inf  # s of the clock
        self.empty_since = math.inf  # its answers have named no session since then, s of the clock
        self.idle_since = math.inf  # nor requests; likewise
        self.problem = "it has not answered yet"
        self.n_polls = 0
        self.counted = 0  # number of the last poll whose result counts
        self.settles = 0  # number of the first poll that says what is left after a failure

    @property
    def health(self) -> Health:
        if self.details is None:
            return "UNKNOWN"
        return "SUSPECT" if self.problem else "READY"


class Registry(NodeManager):
    """One per orchestrator. `clock` is monotonic, s. `poll` raises `StarlingError`, `OSError` or `TimeoutError`."""

    def __init__(self, poll: Poll, clock: Callable[[], float]) -> None:
        self._poll = poll
        self._clock = clock
        self._agents: dict[str, _Agent] = {}
        self._cordons: Mapping[str, Cordon] = {}
        self._emptied: set[str] = set()  # agents that have left without a session
        self._draining_since: dict[str, float] = {}  # when this process learned it, s of the clock
        self.refused = 0  # agents beyond MAX_AGENTS

    # ---------------------------------------------------------------- who is there

    async def register_node(self, node: AgentRecord) -> None:
        """Add an agent, or replace it by its next incarnation."""
        known = self._agents.get(node.agent_id)
        if known is not None and known.record == node:
            return
        if known is None and len(self._agents) >= MAX_AGENTS:
            self.refused += 1
            return
        self._agents[node.agent_id] = _Agent(node, self._clock())
        self._emptied.discard(node.agent_id)

    def remove_node(self, agent_id: str) -> bool:
        """Its lease has ended. Whether it was registered."""
        if self.is_empty(agent_id) and len(self._emptied) < MAX_AGENTS:
            self._emptied.add(agent_id)
        return self._agents.pop(agent_id, None) is not None

    def has_emptied(self, agent_id: str) -> bool:
        """Whether the agent has left after all its sessions had moved: what it had is elsewhere, or has ended."""
        return agent_id in self._emptied

    def is_empty(self, agent_id: str) -> bool:
        """Whether the agent drains and, for some time, has had neither sessions nor moves that are not complete."""
        agent, since = self._agents.get(agent_id), self._draining_since.get(agent_id, math.inf)
        return agent is not None and agent.answered_at - max(since, agent.empty_since) >= REPORTED_S

    def is_idle(self, agent_id: str) -> bool:
        """Whether it is empty and, for some time, has had no requests: prefixes are sent after them."""
        agent, since = self._agents.get(agent_id), self._draining_since.get(agent_id, math.inf)
        return agent is not None and agent.answered_at - max(since, agent.idle_since) >= REPORTED_S

    def awaits_answers(self) -> bool:
        """Whether agents have been registered so lately that their first answers may still come."""
        since = self._clock() - UNANSWERED_S
        return any(agent.details is None and agent.since > since for agent in self._agents.values())

    async def discover_nodes(self) -> list[AgentRecord]:
        """The agents that are registered, by id."""
        return [self._agents[name].record for name in sorted(self._agents)]

    def find(self, agent_id: str) -> AgentRecord | None:
        """The record of an agent; None if it is not registered."""
        agent = self._agents.get(agent_id)
        return agent.record if agent is not None else None

    # ---------------------------------------------------------------- how they are

    async def health_check_nodes(self) -> list[NodeHealth]:
        """Poll all agents at once; what was found."""
        await asyncio.gather(*(self.check_node(name) for name in list(self._agents)))
        return self.health()

    async def check_node(self, agent_id: str) -> bool:
        """Poll one agent; whether its state is what it has answered now, or to a poll that began later."""
        agent = self._agents.get(agent_id)
        if agent is None:
            return False
        agent.n_polls = number = agent.n_polls + 1
        details, failure = None, ""
        try:
            details = await self._poll(agent.record)
        except (StarlingError, OSError, TimeoutError) as error:
            failure = str(error) or type(error).__name__
        if number < agent.counted:
            return not agent.problem
        agent.counted = number
        if details is None:
            agent.problem, agent.settles = failure, 0
            return False
        if details.version != VERSION:
            agent.problem = (
                f"{agent.record.url} answers in version {details.version} of the agents' API, and this orchestrator "
                f"uses version {VERSION}: run the same release everywhere"
            )
            return False
        if (details.agent_id, details.incarnation) != (agent_id, agent.record.incarnation):
            agent.problem = f"{agent.record.url} answers as {details.agent_id}, incarnation {details.incarnation}"
            return False
        agent.details, agent.answered_at, agent.problem = details, self._clock(), ""
        agent.empty_since = min(agent.empty_since, agent.answered_at) if _has_no_sessions(details) else math.inf
        is_idle = agent.empty_since < math.inf and not any(
            one.running or one.vllm_queue_length or one.silent_s for one in details.loaded_models
        )
        agent.idle_since = min(agent.idle_since, agent.answered_at) if is_idle else math.inf
        return True

    def answer_of(self, agent_id: str) -> HeartbeatResponse | None:
        """What an agent has answered to the last poll; None if it has not."""
        agent = self._agents.get(agent_id)
        return agent.details if agent is not None and agent.health == "READY" else None

    def suspect(self, agent_id: str, reason: str) -> None:
        """A request to the agent or its engine has failed: others are preferred until its next answer."""
        agent = self._agents.get(agent_id)
        if agent is not None:
            agent.problem = reason
            self.doubt(agent_id)

    def doubt(self, agent_id: str) -> None:
        """An engine of the agent has failed, so that what the agent has said of it may be old."""
        if agent := self._agents.get(agent_id):
            agent.settles = agent.n_polls + 1

    def is_unsettled(self, agent_id: str) -> bool:
        """Whether no poll of the agent has ended that began after it, or an engine of it, had failed."""
        agent = self._agents.get(agent_id)
        return agent is not None and agent.counted < agent.settles

    def health(self) -> list[NodeHealth]:
        """What the last polls found, by agent."""
        now = self._clock()
        return [
            NodeHealth(name, agent.health, agent.problem, now - agent.answered_at)
            for name, agent in sorted(self._agents.items())
        ]

    # ---------------------------------------------------------------- what they may do

    def set_cordons(self, cordons: Mapping[str, Cordon]) -> None:
        """The cordons of the store."""
        self._cordons = cordons
        now, draining = self._clock(), [name for name, one in cordons.items() if one.is_draining]
        self._draining_since = {name: self._draining_since.get(name, now) for name in draining}

    def cordon(self, agent_id: str) -> Cordon | None:
        """The agent's cordon; None without one."""
        return self._cordons.get(agent_id)

    def table(self) -> list[NodeView]:
        """The routing table: all agents that have answered."""
        now = self._clock()
        return [
            NodeView(
                agent_id=name,
                url=agent.record.url,
                details=agent.details,
                health=agent.health,
                may_start=name not in self._cordons,
                reason="draining" if self._is_draining(name) else "cordoned" if name in self._cordons else "",
                is_draining=self._is_draining(name),
                silent_s=0.0 if agent.health == "READY" else now - agent.answered_at,
                draining_since=self._draining_since.get(name, 0.0),
            )
            for name, agent in sorted(self._agents.items())
            if agent.details is not None
        ]

    def _is_draining(self, agent_id: str) -> bool:
        cordon = self._cordons.get(agent_id)
        return cordon is not None and cordon.is_draining


def _has_no_sessions(details: HeartbeatResponse) -> bool:
    """An engine that starts has yet to count those on its disk."""
    return not any(
        one.sessions or one.sessions_moving or one.model_state in LOADING_STATES for one in details.loaded_models
    )
