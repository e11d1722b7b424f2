"""What this agent gives of its engines' KV pages: to one agent, for one request, once, and soon.

An orchestrator that moves a request asks for a ticket, and passes it to the agent that gets the request.  A ticket is a
secret of this agent: nothing else opens a page, and no agent can ask for one over TLS.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import InternalError, NotFound, TooLarge
from pipeline.fleet.bodies import GivePagesRequest, GivePagesResponse
from pipeline.ipc import control
from shm.arena import ArenaError
from stages.agent.kv_pages.arena_pages import FoundPages, find_pages
from stages.agent.models import Models

TICKET_S = 15.0  # until it must have been used
MAX_TICKETS = 64  # beyond which the oldest one is dropped
CALL_S = 2.0  # of a call to the engine


class _Ticket(NamedTuple):
    request_id: str
    agent_id: str  # who may use it
    pages: FoundPages
    until: float  # s of the clock


class Giver:
    """One per agent. `max_bytes`: of one request's pages, 0: none are given. `clock`: monotonic, s."""

    def __init__(self, models: Models, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._max_bytes = max_bytes
        self._clock = clock
        self._tickets: dict[str, _Ticket] = {}  # the oldest first

    async def offer(self, asked: GivePagesRequest) -> GivePagesResponse:
        """A ticket for the pages of a running request. Raises `StarlingError`."""
        if not self._max_bytes:
            raise NotFound("this agent gives no KV pages (fleet.agent.page_mb)")
        most = min(self._max_bytes, asked.max_bytes or self._max_bytes)
        engine = self._models.find(asked.model_id).engine
        folder, run_dir = (engine.kv_arenas, engine.control_dir) if engine is not None else (None, None)
        if folder is None or run_dir is None:
            raise NotFound(f"the engine of {asked.model_id!r} gives no KV pages")
        call = {"op": "tails", "model": asked.model_id, "request": asked.request_id}
        found = await asyncio.to_thread(control.call, run_dir, "kv", call, CALL_S)
        path = folder / Path(str(found["arena"])).name
        try:
            pages = await asyncio.to_thread(find_pages, path, found["digest"], found["tails"], most)
        except (OSError, ArenaError, ValueError) as error:
            raise InternalError(f"the KV pages of {asked.model_id!r} cannot be read: {error}") from None
        if not pages.n_known:
            raise NotFound(f"request {asked.request_id!r} has no KV pages here any more")
        if not pages.places:
            raise TooLarge(f"no KV page of the request is within {most} bytes (half of fleet.agent.page_mb)")
        ticket = secrets.token_urlsafe(24)
        self._add(ticket, _Ticket(asked.request_id, asked.agent_id, pages, self._clock() + TICKET_S))
        return GivePagesResponse(
            ticket=ticket, pages=len(pages.places), bytes=pages.head.nbytes, of_pages=pages.n_known
        )

    def redeem(self, ticket: str, agent_id: str) -> FoundPages:
        """The pages of a ticket, which is then used. `agent_id`: who shows it; "": not known. Raises `NotFound`."""
        self._expire()
        found = self._tickets.get(ticket)
        if found is None or (agent_id and agent_id != found.agent_id):
            raise NotFound("there is no such ticket for KV pages; it may have been used, or be too old")
        del self._tickets[ticket]
        return found.pages

    def _add(self, name: str, ticket: _Ticket) -> None:
        """Instead of an earlier one for the same request and agent. Unused tickets stop no later ones."""
        self._expire()
        same = (ticket.request_id, ticket.agent_id)
        for known in [name for name, one in self._tickets.items() if (one.request_id, one.agent_id) == same]:
            del self._tickets[known]
        while len(self._tickets) >= MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        self._tickets[name] = ticket

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, one in self._tickets.items() if one.until <= now]:
            del self._tickets[name]
