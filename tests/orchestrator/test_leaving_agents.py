"""Agents that have left the store: followed while they have requests and answer, and lost when they do not."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.errors import ModelUnavailable
from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.fleet.records import AgentRecord
from stages.orchestrator.leaving_agents import LeavingAgents
from tests.orchestrator.agents import engine, heartbeat, view

POLL_S, SILENT_S = 0.5, 3.0
RECORD = AgentRecord(agent_id="a", url="http://a", incarnation="1")


class Site:
    """One agent that has left. Time passes while its follower sleeps, up to `until`."""

    def __init__(self, until: float) -> None:
        self.now = 0.0
        self.until = until
        self.silent_from = float("inf")
        self.serves_until = float("inf")
        self.others_until = 0.0  # other orchestrators have requests there
        self.moves: list[float] = []
        self.lost: list[tuple[float, str]] = []
        self.paused = asyncio.Event()
        self.agents = LeavingAgents(self.poll, self, POLL_S, SILENT_S, lambda: self.now, self.sleep)

    async def poll(self, record: AgentRecord) -> HeartbeatResponse:
        if self.now >= self.silent_from:
            raise ModelUnavailable("silent")
        return heartbeat("a", engine(running=int(self.now < self.others_until)))

    async def sleep(self, seconds: float) -> None:
        if self.now >= self.until:
            self.paused.set()
            await asyncio.Event().wait()
        self.now += seconds

    def serves(self, agent_id: str) -> bool:
        return self.now < self.serves_until

    def move_streams(self, agent_id: str, reason: str) -> int:
        self.moves.append(self.now)
        return 0

    def lose_agent(self, agent_id: str, reason: str) -> int:
        self.lost.append((self.now, reason))
        self.paused.set()
        return 0

    async def leave(self, age_s: float = 0.0) -> None:
        self.agents.begin(RECORD, age_s, view("a", engine()))
        await self.paused.wait()


async def test_what_can_move_is_moved_at_each_look_until_all_has_ended() -> None:
    site = Site(100.0)
    site.serves_until = 20.0
    await site.leave()
    assert site.now == 20.0 and site.moves == [POLL_S * number for number in range(41)]


async def test_its_engines_are_known_while_another_orchestrator_has_requests_there() -> None:
    site = Site(10.0)
    site.serves_until, site.others_until = 5.0, 20.0
    await site.leave()
    assert [one.agent_id for one in site.agents.views] == ["a"]
    await site.agents.close()
    site = Site(100.0)
    site.serves_until, site.others_until = 5.0, 20.0
    await site.leave()
    assert site.now == 20.0 and site.agents.views == []


@pytest.mark.parametrize(("silent_from", "age_s", "lost_at"), [(5.0, 0.0, 8.0), (0.0, 2.0, 1.5), (0.0, 3.5, 0.0)])
async def test_one_that_falls_silent_is_lost(silent_from: float, age_s: float, lost_at: float) -> None:
    site = Site(100.0)
    site.silent_from = silent_from
    await site.leave(age_s)
    ((at, reason),) = site.lost
    assert lost_at <= at <= lost_at + POLL_S and "does not answer" in reason


@pytest.mark.parametrize(("incarnation", "n_lost"), [("1", 0), ("2", 1)])
async def test_one_that_is_back_keeps_its_requests_and_its_successor_has_none(incarnation: str, n_lost: int) -> None:
    site = Site(1.0)
    await site.leave()
    site.agents.returned(AgentRecord(agent_id="a", url="http://a", incarnation=incarnation))
    assert len(site.lost) == n_lost
    site.agents.returned(AgentRecord(agent_id="a", url="http://a", incarnation="3"))  # it is not followed any more
    assert len(site.lost) == n_lost
    await site.agents.close()
