"""One response at a time continues a conversation, at whichever orchestrator.

    responses/turn/FOLDER/ID   the request that continues the conversation, its body's digest, and until when it waits
                               for its client if that has left; with a lease of its orchestrator

A request in the background has the record only until it is written down (jobs.py), which says the same of it until its
response is stored.  After the death of an orchestrator, whose requests may go on at another one, the next response may
begin: the items of both are then added, in the order in which they end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from pipeline.api.idempotency_key import other_body
from pipeline.api.response_object import response_id_of
from pipeline.coordination.election import Election
from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import Conflict, StorageUnavailable
from stages.orchestrator.responses.heads import is_conversation
from stages.orchestrator.responses.jobs import Jobs
from stages.orchestrator.responses.store import ResponseStore
from stages.orchestrator.responses.use import PREFIX, answer, folder_of
from stages.orchestrator.slots import counts_until_done

TURNS = f"{PREFIX}turn/"
LEASE_S = 10.0  # how long a conversation waits after the death of an orchestrator
LEFT_S = 60.0  # how long an engine goes on with a keyed request whose client has left
END_S = 1.0  # for the store to end a turn
TRIES = 8  # while others end their turns
NO_DIGEST = "-"  # of a request without an Idempotency-Key


class Turn:
    """What a request holds of its conversation. Nothing if an earlier attempt of the request holds it."""

    def __init__(
        self,
        holding: asyncio.Future[None] | None = None,
        last: Callable[[], Awaitable[object]] | None = None,
        place: str = "",
    ) -> None:
        """`last`: lets the record last for `LEFT_S` although the turn ends here. Raises `StorageUnavailable`.

        `place`: key of the record.
        """
        self.place = place
        self._holding = holding
        self._last = last
        self._has_ended = False
        self._is_keeping = False

    @property
    def holds(self) -> bool:
        """Whether it is this request that must end it."""
        return self._holding is not None

    @property
    def is_ending(self) -> bool:
        """Whether the record is being removed."""
        return self._has_ended

    async def end(self) -> None:
        """Let the next request begin. Idempotent. While the response is being stored it has no effect."""
        if self._holding is not None and not self._is_keeping:
            counts_until_done(self._holding)
            self.resign()
            await asyncio.wait({self._holding}, timeout=END_S)

    async def leave(self) -> None:
        """The client has left, and the engine goes on for a while: the turn ends later, or with a repetition."""
        if self._last is not None and not (self._has_ended or self._is_keeping):
            with suppress(StorageUnavailable):
                await self._last()

    def keep(self) -> None:
        """The response is being stored, also if its client leaves: the turn lasts until `kept`."""
        self._is_keeping = True

    async def kept(self) -> None:
        """The response was stored, or could not be."""
        self._is_keeping = False
        await self.end()

    def resign(self) -> None:
        """Begin to end it. Once: cancelled again, the task would leave the record until its lease ends."""
        if self._holding is not None and not self._has_ended:
            self._has_ended = True
            self._holding.cancel()


class _Record(NamedTuple):
    """The value of a record: words, of which the last ones may be missing."""

    request_id: str
    digest: str = NO_DIGEST  # hexadecimal
    until: str = "0"  # s since 1970, when the conversation is free although the request was not repeated


class ConversationTurns:
    """One per orchestrator. `wall`: s since 1970."""

    def __init__(
        self, store: CoordinationStore, jobs: Jobs, responses: ResponseStore, wall: Callable[[], float]
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._responses = responses
        self._wall = wall
        self._held: dict[asyncio.Future[None], Turn] = {}
        self._leaving: set[asyncio.Future[None]] = set()  # ends of turns whose clients have left before they had them

    async def take(self, tenant: str, name: str, request_id: str, digest: bytes = b"", key: str = "") -> Turn:
        """Begin a response. `digest`: of the body of a request with an Idempotency-Key, which is `key`.

        Raises `Conflict` if another one is in progress, or this one with another body, and `StorageUnavailable`.
        """
        if not is_conversation(name):
            return Turn()  # it will not be found
        taking = asyncio.ensure_future(self._take(tenant, name, request_id, digest, key))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:  # the store may have the record already
            leaving = asyncio.ensure_future(_end(taking))
            counts_until_done(leaving)
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            raise

    async def _take(self, tenant: str, name: str, request_id: str, digest: bytes, key: str) -> Turn:
        place = f"{TURNS}{folder_of(tenant)}/{name}"
        mine = _Record(request_id, digest.hex() or NO_DIGEST)
        election = Election(self._store, place, _encode(mine), LEASE_S)
        for _ in range(TRIES):
            term = await answer(election.attempt())
            if term is not None:
                holding = asyncio.ensure_future(election.hold(term))
                last = partial(self._let_last, place, term.fence, mine)
                turn = self._held[holding] = Turn(holding, last, place)
                holding.add_done_callback(self._held.pop)
                try:
                    await asyncio.sleep(0)  # it has begun, so that it will resign
                    await self._check_background(tenant, name, request_id)
                except BaseException:
                    await turn.end()
                    raise
                return turn
            item = await answer(self._store.get(place))
            if item is None:
                continue
            known = _decode(item.value)
            if known.request_id != request_id and (ending := self._ending(place)):
                await answer(asyncio.wait(ending))  # their clients may have their answers already
                continue
            if known.request_id != request_id:
                raise _in_progress(name, min(LEFT_S, float(known.until) - self._wall()))
            if NO_DIGEST not in (mine.digest, known.digest) and known.digest != mine.digest:
                raise other_body(key)
            return Turn()
        raise _in_progress(name)

    def _ending(self, place: str) -> list[asyncio.Future[None]]:
        """The ends of turns of this orchestrator for which the store takes longer than `END_S`."""
        return [holding for holding, turn in self._held.items() if turn.is_ending and turn.place == place]

    async def _let_last(self, place: str, fence: int, record: _Record) -> None:
        lease = await answer(self._store.grant(LEFT_S))
        left = record._replace(until=f"{self._wall() + LEFT_S:.0f}")
        await answer(self._store.swap(place, fence, _encode(left), lease))

    async def end_of(self, tenant: str, name: str, request_id: str) -> None:
        """The response of a request is complete, which an orchestrator that has died may have held the turn for.

        Raises `StorageUnavailable`.
        """
        if is_conversation(name):
            item = await answer(self._store.get(f"{TURNS}{folder_of(tenant)}/{name}"))
            if item is not None and _decode(item.value).request_id == request_id:
                await answer(self._store.swap(item.key, item.revision, None))

    async def _check_background(self, tenant: str, name: str, request_id: str) -> None:
        for opened in await answer(self._jobs.all()):
            if (opened.tenant, opened.conversation) != (tenant, name) or opened.request_id == request_id:
                continue
            # One whose response is stored has ended, as clients see it.
            if not await self._responses.has(tenant, response_id_of(opened.request_id)):
                raise _in_progress(name)

    async def close(self) -> None:
        """End all turns, when all requests have ended."""
        await asyncio.gather(*self._leaving)
        for turn in self._held.values():
            turn.resign()
        await asyncio.gather(*self._held, return_exceptions=True)


async def _end(taking: asyncio.Future[Turn]) -> None:
    with suppress(Exception):  # then there is no turn
        await (await taking).end()


def _encode(record: _Record) -> bytes:
    return " ".join(record).encode()


def _decode(value: bytes) -> _Record:
    words = value.decode("ascii", "replace").split(" ")
    return _Record(*words[:2], *(word for word in words[2:3] if word.isdecimal()))


def _in_progress(name: str, left_s: float = 0.0) -> Conflict:
    """`left_s`: for which the request may be repeated by its client, which has left; 0 or less: it has not."""
    remedy = "wait for its end, or cancel it"
    if left_s > 0:
        remedy = f"its client has left, and may repeat it with its Idempotency-Key for {left_s:.0f} s"
    return Conflict(
        f"conversation {name[:80]!r} has a response in progress; {remedy}",
        "conversation",
        retry_after_s=max(0.0, left_s),
    )
