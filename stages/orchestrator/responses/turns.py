"""One response at a time continues a conversation, at whichever orchestrator.

    responses/turn/FOLDER/ID   the request that continues the conversation, with a lease of its orchestrator

A request in the background has the record only until it is written down (jobs.py), which says the same of it.  After
the death of an orchestrator, whose requests may go on at another one, the next response may begin: the items of both
are then added, in the order in which they end.
"""

from __future__ import annotations

import asyncio

from pipeline.coordination.election import Election
from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import Conflict
from stages.orchestrator.responses.heads import is_conversation
from stages.orchestrator.responses.jobs import Jobs
from stages.orchestrator.responses.use import PREFIX, answer, folder_of

TURNS = f"{PREFIX}turn/"
LEASE_S = 10.0  # how long a conversation waits after the death of an orchestrator
END_S = 1.0  # for the store to end a turn
TRIES = 8  # while others end their turns


class Turn:
    """What a request holds of its conversation. Nothing if an earlier attempt of the request holds it."""

    def __init__(self, holding: asyncio.Future[None] | None = None) -> None:
        self._holding = holding

    async def end(self) -> None:
        """Let the next request begin. Idempotent."""
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.wait({self._holding}, timeout=END_S)


class ConversationTurns:
    """One per orchestrator."""

    def __init__(self, store: CoordinationStore, jobs: Jobs) -> None:
        self._store = store
        self._jobs = jobs
        self._holding: set[asyncio.Future[None]] = set()

    async def take(self, tenant: str, name: str, request_id: str) -> Turn:
        """Begin a response. Raises `Conflict` if another one is in progress, and `StorageUnavailable`."""
        if not is_conversation(name):
            return Turn()  # it will not be found
        key = f"{TURNS}{folder_of(tenant)}/{name}"
        election = Election(self._store, key, request_id.encode(), LEASE_S)
        for _ in range(TRIES):
            term = await answer(election.attempt())
            if term is not None:
                holding = asyncio.ensure_future(election.hold(term))
                self._holding.add(holding)
                holding.add_done_callback(self._holding.discard)
                await asyncio.sleep(0)  # it has begun, so that it will resign
                turn = Turn(holding)
                try:
                    await self._check_background(tenant, name, request_id)
                except BaseException:
                    await turn.end()
                    raise
                return turn
            item = await answer(self._store.get(key))
            if item is not None and item.value != request_id.encode():
                raise _in_progress(name)
            if item is not None:
                return Turn()
        raise _in_progress(name)

    async def end_of(self, tenant: str, name: str, request_id: str) -> None:
        """The response of a request is complete, which an orchestrator that has died may have held the turn for.

        Raises `StorageUnavailable`.
        """
        if is_conversation(name):
            item = await answer(self._store.get(f"{TURNS}{folder_of(tenant)}/{name}"))
            if item is not None and item.value == request_id.encode():
                await answer(self._store.swap(item.key, item.revision, None))

    async def _check_background(self, tenant: str, name: str, request_id: str) -> None:
        for opened in await answer(self._jobs.all()):
            if (opened.tenant, opened.conversation) == (tenant, name) and opened.request_id != request_id:
                raise _in_progress(name)

    async def close(self) -> None:
        """End all turns, when all requests have ended."""
        holding = list(self._holding)
        for one in holding:
            one.cancel()
        await asyncio.gather(*holding, return_exceptions=True)


def _in_progress(name: str) -> Conflict:
    return Conflict(
        f"conversation {name[:80]!r} has a response in progress; wait for its end, or cancel it", "conversation"
    )
