"""What this agent gives of its engines' KV pages: to one agent, for one request or the prefixes of a tenant, once, and
soon.

An orchestrator that moves a request or prefixes asks for a ticket, and passes it to the agent that gets them.  A ticket
is a secret of this agent: nothing else opens a page, and no agent can ask for one over TLS.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import InternalError, NotFound, TooLarge
from pipeline.fleet.bodies import (
    GivePagesRequest,
    GivePagesResponse,
    GivePrefixesRequest,
    HotPrefix,
    ListPrefixesRequest,
    ListPrefixesResponse,
)
from pipeline.ipc import control
from shm.arena import ArenaError
from shm.sent_pages import IDENTITY_BYTES
from stages.agent.disk_threads import PAGES
from stages.agent.kv_pages.arena_pages import FoundPages, find_pages
from stages.agent.models import Models

TICKET_S = 15.0  # until it must have been used
MAX_TICKETS = 64  # beyond which the oldest one is dropped
CALL_S = 2.0  # of a call to the engine
LEFT_S = 20.0  # for which prefixes count as left to be sent: an orchestrator that died sends no more


class _Ticket(NamedTuple):
    name: str  # the request, or the tails of prefixes
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
        self._left: dict[str, tuple[int, float]] = {}  # prefixes to be sent, and until when that counts, by model

    async def offer(self, asked: GivePagesRequest) -> GivePagesResponse:
        """A ticket for the pages of a running request. Raises `StarlingError`."""
        if not self._max_bytes:
            raise NotFound("this agent gives no KV pages (fleet.agent.page_mb)")
        most = min(self._max_bytes, asked.max_bytes or self._max_bytes)
        found, folder = await self._ask(asked.model_id, {"op": "tails", "request": asked.request_id})
        pages = await self._find(asked.model_id, found, folder, found["tails"], most, found.get("lowest", ()))
        if not pages.n_known:
            raise NotFound(f"request {asked.request_id!r} has no KV pages here any more")
        return self._ticket_for(asked.request_id, asked.agent_id, pages, most)

    async def list_prefixes(self, asked: ListPrefixesRequest) -> ListPrefixesResponse:
        """The most used prefixes of a model. Raises `StarlingError`."""
        if not self._max_bytes or not asked.limit:
            self._left.pop(asked.model_id, None)
            return ListPrefixesResponse()
        found, _ = await self._ask(asked.model_id, {"op": "prefixes", "limit": asked.limit})
        prefixes = tuple(
            HotPrefix(**{**one, "names": np.array(one["names"], "<u8").tobytes()}) for one in found["prefixes"]
        )
        self._left[asked.model_id] = len(prefixes), self._clock() + LEFT_S
        return ListPrefixesResponse(prefixes=prefixes, page_bytes=int(found["page_bytes"]) + IDENTITY_BYTES)

    async def offer_prefixes(self, asked: GivePrefixesRequest) -> GivePagesResponse:
        """A ticket for the pages of prefixes. Raises `StarlingError`."""
        most = min(self._max_bytes, asked.max_bytes)
        found, folder = await self._ask(asked.model_id, {"op": "prefixes", "limit": 0})
        pages = await self._find(asked.model_id, found, folder, asked.tails, most)
        if not pages.n_known:
            raise NotFound("the prefixes have no KV pages here any more")
        return self._ticket_for(",".join(asked.tails), asked.agent_id, pages, most)

    def prefixes_left(self, model: str) -> int:
        """Prefixes that an orchestrator is sending to other agents."""
        count, until = self._left.get(model, (0, 0.0))
        return count if self._clock() < until else 0

    async def _ask(self, model: str, call: dict[str, Any]) -> tuple[dict[str, Any], Path]:
        """The answer of a model's engine, and the directory of its arenas. Raises `StarlingError`."""
        placement = self._models.find(model)
        engine = placement.engine
        folder, run_dir = (engine.kv_arenas, engine.control_dir) if engine is not None else (None, None)
        if folder is None or run_dir is None:
            raise NotFound(f"the engine of {model!r} gives no KV pages")
        return await PAGES.run(control.call, run_dir, "kv", {**call, "model": placement.model_id}, CALL_S), folder

    @staticmethod
    async def _find(
        model: str,
        found: dict[str, Any],
        folder: Path,
        tails: Sequence[str],
        max_bytes: int,
        lowest: Sequence[int] = (),
    ) -> FoundPages:
        path = folder / Path(str(found["arena"])).name
        try:
            return await PAGES.run(find_pages, path, found["digest"], tails, max_bytes, lowest)
        except (OSError, ArenaError, ValueError) as error:
            raise InternalError(f"the KV pages of {model!r} cannot be read: {error}") from None

    def _ticket_for(self, name: str, agent_id: str, pages: FoundPages, max_bytes: int) -> GivePagesResponse:
        if not pages.places:
            raise TooLarge(f"no KV page of it is within {max_bytes} bytes (half of fleet.agent.page_mb)")
        ticket = secrets.token_urlsafe(24)
        self._add(ticket, _Ticket(name, agent_id, pages, self._clock() + TICKET_S))
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
        """Instead of an earlier one for the same pages and agent. Unused tickets stop no later ones."""
        self._expire()
        same = (ticket.name, ticket.agent_id)
        for known in [name for name, one in self._tickets.items() if (one.name, one.agent_id) == same]:
            del self._tickets[known]
        while len(self._tickets) >= MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        self._tickets[name] = ticket

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, one in self._tickets.items() if one.until <= now]:
            del self._tickets[name]
