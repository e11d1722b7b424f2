"""Which agent gets a request with an `Idempotency-Key`, as all orchestrators agree in the coordination store.

    requests/ID    the agent; with a lease

A client may send a request several times at once, through several orchestrators.  Each of them asks the engines whether
one has the request, and all may learn that none has it yet.  So an orchestrator claims the request for an agent before
it sends it there: the others send theirs to the same agent, whose engine computes it once.  The orchestrator that has
made a claim asks the engines afterwards, because the claim of an earlier attempt may have ended.  If the agent fails
the request, the claim is changed to another one.

A claim is needed until the engine has the request, and is removed when the request has ended here, or by its lease.
While the store does not answer, requests of one orchestrator still go to one agent.  Without sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import StarlingError

CLAIMS = "requests/"
LEASE_S = 60.0  # a claim has half of it at least, in which the request reaches an engine
STORE_S = 1.0  # for the store to answer
TRIES = 8  # of a claim that other orchestrators change at the same time
REMOVE_S = 1.0  # between two removals of claims whose requests have ended
MAX_ENDED = 4096  # that wait for it; further ones are left to their lease

Locate = Callable[[str], Awaitable[str]]  # (wanted agent) -> the other agent whose engine has the request, or ""


class KeyClaim:
    """Of one request, for all attempts of it here."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.agent_id = ""  # as it was read last
        self.revision = 0  # of the record, if it was written here
        self.n_holders = 0
        self.lock = asyncio.Lock()


class KeyClaims:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(
        self, store: CoordinationStore | None, is_store_up: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        """`store`: None for an orchestrator that is alone."""
        self._store = store
        self._is_store_up = is_store_up
        self._clock = clock
        self._claims: dict[str, KeyClaim] = {}
        self._lease = ""
        self._lease_until = float("-inf")
        self._ended: dict[str, int] = {}  # keys and revisions of claims to be removed
        self._removing: asyncio.Task[None] | None = None

    def enter(self, request_id: str) -> KeyClaim:
        """The claim of a request, which the caller `leave`s."""
        claim = self._claims.setdefault(request_id, KeyClaim(request_id))
        claim.n_holders += 1
        return claim

    def leave(self, claim: KeyClaim) -> None:
        """An attempt of the request has ended."""
        claim.n_holders -= 1
        if claim.n_holders:
            return
        del self._claims[claim.request_id]
        if claim.revision and len(self._ended) < MAX_ENDED:
            self._ended[CLAIMS + claim.request_id] = claim.revision
            if self._removing is None or self._removing.done():
                self._removing = asyncio.get_running_loop().create_task(self._remove())

    async def take(self, claim: KeyClaim, wanted: str, failed: Collection[str], locate: Locate) -> str:
        """The agent that gets the request: `wanted`, or the one that it was claimed for, unless that is in `failed`."""
        async with claim.lock:
            is_new = False
            try:
                if self._store is not None and self._is_store_up():
                    async with asyncio.timeout(STORE_S):
                        is_new = await self._agree(self._store, claim, wanted, failed)
                    if is_new and (found := await locate(wanted)) and found not in failed:
                        async with asyncio.timeout(STORE_S):
                            await self._agree(self._store, claim, found, {*failed, wanted})
                    return claim.agent_id
            except (StarlingError, TimeoutError):
                pass  # each orchestrator decides by itself
            if not claim.agent_id or claim.agent_id in failed:
                claim.agent_id = wanted
            return claim.agent_id

    async def close(self) -> None:
        """Remove no more claims."""
        if self._removing is not None:
            self._removing.cancel()
            await asyncio.gather(self._removing, return_exceptions=True)

    # ---------------------------------------------------------------- the store

    async def _agree(self, store: CoordinationStore, claim: KeyClaim, wanted: str, failed: Collection[str]) -> bool:
        """Set the claim's agent as the store has it. True: the record is new. Raises `StarlingError`."""
        key, revision = CLAIMS + claim.request_id, claim.revision if claim.agent_id in failed else 0
        for _ in range(TRIES):
            written = await store.swap(key, revision, wanted.encode(), await self._current_lease(store))
            if written is not None:
                claim.agent_id, claim.revision = wanted, written
                return not revision
            item = await store.get(key)
            held = item.value.decode("utf-8", "replace") if item is not None else ""
            if item is not None and held not in failed:
                claim.agent_id = held
                claim.revision = item.revision if item.revision == claim.revision else 0
                return False
            revision = item.revision if item is not None else 0
            if item is None:  # it has been removed, or the lease has ended
                self._lease_until = float("-inf")
        claim.agent_id, claim.revision = wanted, 0
        return False

    async def _current_lease(self, store: CoordinationStore) -> str:
        """A lease of which half is left, for all claims of some time."""
        if self._clock() >= self._lease_until:
            asked = self._clock()
            self._lease = await store.grant(LEASE_S)
            self._lease_until = asked + LEASE_S / 2
        return self._lease

    async def _remove(self) -> None:
        """Remove claims whose requests have ended, unless they were changed by others."""
        while self._ended and self._store is not None:
            await asyncio.sleep(REMOVE_S)
            ended, self._ended = self._ended, {}
            try:
                for key, revision in ended.items():
                    await self._store.swap(key, revision, None)
            except StarlingError:
                return  # their lease ends them
