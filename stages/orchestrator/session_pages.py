"""The KV pages of a session that moves: sent to its new agent where that is faster than computing them.

The agent of the session names its last pages when it gives the session's tokens; those that its engine still holds,
with all before them, are given for a ticket, and the new agent's engine caches them for no request.  Whatever fails is
computed with the next turn.  Bounded in bytes by both agents (`fleet.agent.page_mb`), and in time.  Without sockets.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from pipeline.api.page_owner import key_owner
from pipeline.errors import StarlingError
from pipeline.fleet.bodies import (
    GivePagesResponse,
    GivePrefixesRequest,
    GiveSessionResponse,
    HeartbeatResponse,
    TakePagesResponse,
    TakePrefixesRequest,
)
from pipeline.fleet.records import AgentRecord
from shm.sent_pages import MAX_KEPT_BYTES, TENANT_SHARE
from stages.orchestrator.page_transfers import FIXED_S, LEAST_S, MARGIN_S
from stages.orchestrator.score import loaded

# (agent, path, request, kind of the answer, timeout in s). Raises `StarlingError`.
Call = Callable[[str, str, msgspec.Struct, Any, float], Awaitable[Any]]
USES = 2  # that the pages count as having: they are wanted


class Link(Protocol):
    """What is measured between two agents (page_transfers.py)."""

    def speed(self, source_id: str, target_id: str) -> float:
        """Bytes/s; 0: they exchange no pages."""

    def measured(self, source_id: str, target_id: str, nbytes: int, seconds: float) -> None:
        """Pages were sent."""

    def late(self, source_id: str, target_id: str, nbytes: int, seconds: float) -> None:
        """Pages were not sent in `seconds`."""

    def failed(self, source_id: str, target_id: str, error: StarlingError) -> None:
        """Pages were not sent."""


class Ticket(NamedTuple):
    """Pages that can be sent to an agent."""

    given: GivePagesResponse
    source: AgentRecord
    owner: str

    @property
    def part(self) -> float:
        """Of the session's pages, 0 to 1: the first ones, which both agents have room for."""
        return min(1.0, self.given.pages / self.given.of_pages) if self.given.of_pages else 1.0


class SessionPages:
    """One per orchestrator. `details(agent)`: its last answer. `find(agent)`: its record. `clock`: monotonic, s."""

    def __init__(
        self,
        call: Call,
        link: Link,
        find: Callable[[str], AgentRecord | None],
        details: Callable[[str], HeartbeatResponse | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._link = link
        self._find = find
        self._details = details
        self._clock = clock

    def speed(self, source_id: str, target_id: str, model: str) -> float:
        """Of pages of the model between two agents, bytes/s; 0: they exchange none."""
        if not self._room(source_id, target_id, model):
            return 0.0
        return self._link.speed(source_id, target_id)

    def _room(self, source_id: str, target_id: str, model: str) -> int:
        """Bytes that can be sent at once."""
        most = []
        for agent_id in (source_id, target_id):
            details = self._details(agent_id)
            one = loaded(details, model) if details is not None else None
            if details is None or one is None or not one.moves_prefixes:
                return 0
            most.append((details.kv_page_bytes, one.page_tokens))
        # A whole tenant's share at most: the target's engine would refuse what is longer after it has come.
        return min(most[0][0], most[1][0], MAX_KEPT_BYTES // TENANT_SHARE) if most[0][1] == most[1][1] else 0

    async def ticket(self, source_id: str, target_id: str, model: str, session: GiveSessionResponse) -> Ticket | None:
        """The pages that the session's agent has of it; None: none can be sent."""
        source, room = self._find(source_id), self._room(source_id, target_id, model)
        if source is None or not room or not session.tails or not self._link.speed(source_id, target_id):
            return None
        asked = GivePrefixesRequest(model_id=model, tails=session.tails, agent_id=target_id, max_bytes=room)
        try:
            given = await self._call(source_id, "/give_prefixes", asked, GivePagesResponse, LEAST_S)
        except StarlingError:
            return None
        return Ticket(given, source, session.owner)

    async def send(self, target_id: str, model: str, tenant: str, ticket: Ticket, computing_s: float) -> bool:
        """Send them if that is faster than computing as many. Whether that was tried.

        `tenant`: of the session.  `computing_s`: of all its pages.
        """
        source_id, nbytes = ticket.source.agent_id, ticket.given.bytes
        speed = self._link.speed(source_id, target_id)
        if not speed or FIXED_S + nbytes / speed >= ticket.part * computing_s:
            return False
        limit_s = max(LEAST_S, 2 * nbytes / speed)
        details = self._details(target_id)
        is_counted = details is not None and details.counts_page_tenants
        take = TakePrefixesRequest(
            model_id=model,
            source=ticket.source,
            ticket=ticket.given.ticket,
            bytes=nbytes,
            timeout_ms=min(60_000, int(1000 * limit_s)),
            tenant=ticket.owner if is_counted else key_owner(ticket.owner),
            account=tenant if is_counted else "",
            uses=USES,
            idle_s=0.0,
        )
        begun = self._clock()
        try:
            taken = await self._call(target_id, "/take_prefixes", take, TakePagesResponse, limit_s + MARGIN_S)
        except StarlingError as error:
            took_s = self._clock() - begun
            self._link.failed(source_id, target_id, error)
            if took_s >= limit_s:
                self._link.late(source_id, target_id, nbytes, took_s)
            return True
        self._link.measured(source_id, target_id, nbytes, taken.seconds)
        return True
