"""Which agent gets a request with an `Idempotency-Key`, as all orchestrators agree in the coordination store.

    requests/ID    the agent; with a lease

A client may send a request several times at once, through several orchestrators.  Each of them asks the engines whether
one has the request (route_finder.py), and all may learn that none has it yet.  So an orchestrator claims the request
for an agent before it asks: the others send theirs to the same agent, whose engine computes it once.  A claim only
breaks such ties: it does not say where the request was before.  If the agent fails the request, or another engine has
it, the claim is changed.

A claim is needed until the engine has the request, and is removed when the request has ended here, or by its lease.
While the store does not answer, or beyond the bound of a tenant, the requests of one orchestrator still go to one
agent.  Without sockets.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import StarlingError

CLAIMS = "requests/"
LEASE_S = 60.0  # a claim has half of it at least, in which the request reaches an engine
STORE_S = 3.0  # for the store to answer, as long as it is not known to be down
TRIES = 8  # of a claim that other orchestrators change at the same time
REMOVE_S = 1.0  # between two removals of claims whose requests have ended
MAX_ENDED = 4096  # that wait for it; further ones are left to their lease
MAX_OF_TENANT = 1024  # in the store, by each orchestrator; further requests go without one


class KeyClaim:
    """Of one request, for all attempts of it here."""

    def __init__(self, request_id: str, tenant: str, *, is_shared: bool) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.is_shared = is_shared  # with other orchestrators
        self.agent_id = ""  # as it was read last
        self.revision = 0  # of the record, if it was written here
        self.n_holders = 0
        self.lock = asyncio.Lock()


class KeyClaims:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(
        self,
        store: CoordinationStore | None,
        is_store_up: Callable[[], bool],
        clock: Callable[[], float],
        store_s: float = STORE_S,
    ) -> None:
        """`store`: None for an orchestrator that is alone. `store_s`: for it to answer."""
        self._store = store
        self._is_store_up = is_store_up
        self._clock = clock
        self._store_s = store_s
        self._claims: dict[str, KeyClaim] = {}
        self._lease = ""
        self._lease_until = float("-inf")
        self._granting: asyncio.Task[str] | None = None
        self._of_tenant: Counter[str] = Counter()  # claims that are, or may be, in the store
        self._agreeing: set[asyncio.Task[str]] = set()
        self._ended: dict[str, KeyClaim] = {}  # to be removed from the store
        self._removing: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """Those of requests that have not ended, and those that are to be removed."""
        return len(self._claims) + len(self._ended)

    def enter(self, request_id: str, tenant: str) -> KeyClaim:
        """The claim of a request, which the caller `leave`s."""
        claim = self._claims.get(request_id)
        if claim is None:
            claim = self._ended.pop(request_id, None)
            if claim is None:
                claim = KeyClaim(request_id, tenant, is_shared=self._of_tenant[tenant] < MAX_OF_TENANT)
                self._count(claim, 1)
            self._claims[request_id] = claim
        claim.n_holders += 1
        return claim

    def leave(self, claim: KeyClaim) -> None:
        """An attempt of the request has ended."""
        claim.n_holders -= 1
        if claim.n_holders:
            return
        del self._claims[claim.request_id]
        if not claim.revision or len(self._ended) >= MAX_ENDED:
            self._count(claim, -1)
            return
        self._ended[claim.request_id] = claim
        if self._removing is None or self._removing.done():
            self._removing = asyncio.get_running_loop().create_task(self._remove())

    async def take(self, claim: KeyClaim, wanted: str, failed: Collection[str]) -> str:
        """The agent that gets the request: `wanted`, or the one that it was claimed for, unless that is in `failed`."""
        if self._store is not None and claim.is_shared and self._is_store_up():
            # It goes on if its request ends meanwhile: what it has written must be removed.
            task = asyncio.get_running_loop().create_task(self._agree(self._store, claim, wanted, frozenset(failed)))
            claim.n_holders += 1
            self._agreeing.add(task)
            task.add_done_callback(partial(self._agreed, claim))
            try:
                async with asyncio.timeout(self._store_s):
                    return await asyncio.shield(task)
            except (StarlingError, TimeoutError):
                pass  # each orchestrator decides by itself
        if not claim.agent_id or claim.agent_id in failed:
            claim.agent_id = wanted
        return claim.agent_id

    async def close(self) -> None:
        """Remove no more claims."""
        others = (self._removing, self._granting)
        tasks: list[asyncio.Task[Any]] = [*self._agreeing, *(task for task in others if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._removing is not None:  # an agreement that ended now may have begun another one
            self._removing.cancel()
            await asyncio.gather(self._removing, return_exceptions=True)

    def _agreed(self, claim: KeyClaim, task: asyncio.Task[str]) -> None:
        self._agreeing.discard(task)
        if not task.cancelled():
            task.exception()  # who waited has it
        self.leave(claim)

    def _count(self, claim: KeyClaim, more: int) -> None:
        if claim.is_shared:
            self._of_tenant[claim.tenant] += more
            if not self._of_tenant[claim.tenant]:
                del self._of_tenant[claim.tenant]

    # ---------------------------------------------------------------- the store

    async def _agree(self, store: CoordinationStore, claim: KeyClaim, wanted: str, failed: Collection[str]) -> str:
        """Set the claim's agent as the store has it, and return it. Raises `StarlingError`, `TimeoutError`."""
        async with asyncio.timeout(LEASE_S / 2), claim.lock:
            key, revision = CLAIMS + claim.request_id, claim.revision if claim.agent_id in failed else 0
            for _ in range(TRIES):
                lease = await self._current_lease(store)
                written = await store.swap(key, revision, wanted.encode(), lease)
                if written is not None:
                    claim.agent_id, claim.revision = wanted, written
                    return wanted
                item = await store.get(key)
                held = item.value.decode("utf-8", "replace") if item is not None else ""
                if item is not None and held not in failed:
                    claim.agent_id = held
                    claim.revision = item.revision if item.revision == claim.revision else 0
                    return held
                if item is None and not revision and lease == self._lease:
                    self._lease_until = float("-inf")  # it may have ended, if the record was not just removed
                revision = item.revision if item is not None else 0
            claim.agent_id, claim.revision = wanted, 0
            return wanted

    async def _current_lease(self, store: CoordinationStore) -> str:
        """A lease of which half is left, for all claims of some time. Those that wait for one share its grant."""
        if self._clock() >= self._lease_until:
            if self._granting is None or self._granting.done():
                self._granting = asyncio.get_running_loop().create_task(self._grant(store))
            return await asyncio.shield(self._granting)  # it goes on for the others if this request ends
        return self._lease

    async def _grant(self, store: CoordinationStore) -> str:
        """A new lease. Raises `StarlingError`, `TimeoutError`."""
        asked = self._clock()
        async with asyncio.timeout(LEASE_S / 2):
            self._lease = await store.grant(LEASE_S)
        self._lease_until = asked + LEASE_S / 2
        return self._lease

    async def _remove(self) -> None:
        """Remove claims whose requests have ended, unless they were changed by others."""
        while self._ended and self._store is not None:
            await asyncio.sleep(REMOVE_S)
            for request_id, claim in list(self._ended.items()):
                async with claim.lock:  # a repetition that comes meanwhile agrees afterwards
                    if self._ended.get(request_id) is not claim:
                        continue  # another request of its key has come
                    try:
                        await self._store.swap(CLAIMS + request_id, claim.revision, None)
                    except StarlingError:
                        pass  # its lease ends it
                    claim.revision = 0
                if self._ended.get(request_id) is claim:
                    del self._ended[request_id]
                    self._count(claim, -1)
