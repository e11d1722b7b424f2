"""Agents that are no longer registered and still answer, with the requests that they have.

On SIGTERM an agent ends its lease first and then its engines, whose streams have `server.drain_timeout_ms` to finish.
A request goes on at such an agent until another one that has the model takes it, as in a drain, or until it ends.  What
breaks off when an engine ends goes on elsewhere, and so does what an agent has when it falls silent.  No new request is
sent there, but its engines are asked about requests and told of cancellations, also for those of other orchestrators.
Called by the stage.  Without sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from pipeline.errors import StarlingError
from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.records import AgentRecord
from stages.orchestrator.interfaces import NodeView
from stages.orchestrator.registry import Poll


class Requests(Protocol):
    """What is asked of the relay."""

    def serves(self, agent_id: str) -> bool:
        """Whether requests are at the agent."""

    def move_streams(self, agent_id: str, reason: str) -> int:
        """Move the requests that another agent can continue at once."""

    def lose_agent(self, agent_id: str, reason: str) -> int:
        """What it serves goes on elsewhere."""


class LeavingAgents:
    """One per orchestrator. `clock` is monotonic, s."""

    def __init__(
        self,
        poll: Poll,
        requests: Requests,
        interval_s: float,
        silent_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`poll` raises `StarlingError`, `OSError` or `TimeoutError`. `silent_s`: after which an agent is lost."""
        self._poll = poll
        self._requests = requests
        self._interval_s = interval_s
        self._silent_s = silent_s
        self._clock = clock
        self._sleep = sleep
        self._following: dict[str, tuple[AgentRecord, asyncio.Task[None]]] = {}
        self._views: dict[str, NodeView] = {}

    @property
    def views(self) -> list[NodeView]:
        """The agents that are followed, as they were in the routing table: their engines may have requests."""
        return list(self._views.values())

    def begin(self, record: AgentRecord, age_s: float, view: NodeView | None) -> None:
        """The agent has left the store. `age_s`: of its last answer; `view`: its row of the table, if it had one."""
        self._end(record.agent_id)
        if view is not None:
            self._views[record.agent_id] = view
        following = self._follow(record, self._clock() - age_s, view.details if view is not None else None)
        self._following[record.agent_id] = record, asyncio.get_running_loop().create_task(following)

    def returned(self, record: AgentRecord | None) -> None:
        """An agent has registered: as the one that had left, or anew, so that the engines of that one have ended."""
        before = self._end(record.agent_id) if record is not None else None
        if record is not None and before is not None and before.incarnation != record.incarnation:
            self._requests.lose_agent(record.agent_id, "the agent has started anew")

    async def close(self) -> None:
        """Follow no agent any longer."""
        tasks = [task for _, task in self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, agent_id: str) -> AgentRecord | None:
        """Follow the agent no longer; its record, if it was followed."""
        record, task = self._following.pop(agent_id, (None, None))
        self._views.pop(agent_id, None)
        if task is not None:
            task.cancel()
        return record

    async def _follow(self, record: AgentRecord, answered_at: float, answer: HeartbeatResponse | None) -> None:
        """Until the agent has no more requests, or does not answer."""
        while self._clock() - answered_at <= self._silent_s:
            self._requests.move_streams(record.agent_id, "the agent has left")
            if not self._requests.serves(record.agent_id) and not (answer and _has_requests(answer)):
                break
            await self._sleep(self._interval_s)
            try:
                found = await self._poll(record)
            except (StarlingError, OSError, TimeoutError):
                continue
            if (found.agent_id, found.incarnation) == (record.agent_id, record.incarnation):
                answered_at, answer = self._clock(), found
        self._requests.lose_agent(record.agent_id, "the agent has left, and does not answer")
        self._following.pop(record.agent_id, None)
        self._views.pop(record.agent_id, None)


def _has_requests(answer: HeartbeatResponse) -> bool:
    return any(one.running or one.vllm_queue_length for one in answer.loaded_models)
