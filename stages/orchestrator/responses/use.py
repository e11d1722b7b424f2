"""How many bytes and responses each tenant has stored: records in the coordination store that all orchestrators change.

    responses/use/FOLDER   of one tenant
    responses/all          of all
    responses/gone/ID     of one that a client has deleted, with a lease
    responses/lock/FOLDER  held by the orchestrator that removes responses of the tenant, with a lease

A response is counted before it is written, and a removal after it: what is stored is never more than what is counted,
whichever process dies in between.  `settle` corrects what such a death has left over, and what a blob store has written
after it had not answered in time.  Removals of a tenant exclude
each other, so that none is counted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec

from pipeline.coordination.interface import Change, Condition, CoordinationStore
from pipeline.errors import ResourceError, StorageUnavailable
from shm.decoding import DECODE_ERRORS

PREFIX = "responses/"
USE = f"{PREFIX}use/"
ALL = f"{PREFIX}all"
LOCK = f"{PREFIX}lock/"
GONE = f"{PREFIX}gone/"
GONE_S = 600.0  # longer than engines and orchestrators keep a stream for its readers
MAX_GONE = 4096  # of one orchestrator
MAX_COUNT = 50_000  # responses in all, so that a blob store can list them
MAX_TENANTS = 4096
STORE_S = 5.0  # for the store to answer
LOCK_S = 30.0  # lease of a removal
REMOVE_S = 20.0  # after which a removal stops by itself
PAUSE_S = 0.02  # between two attempts to begin one
TRIES = 64  # of a change at which other orchestrators change the same records
TRY_PAUSE_S = 0.05  # at most, between two of them: those of several orchestrators must not stay in step
TURN_S = 30.0  # for the changes of this orchestrator that come before
T = TypeVar("T")


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a record."""

    bytes: int = 0
    count: int = 0
    at: float = 0.0  # s since 1970 of the last change


class Shortage(NamedTuple):
    """Why nothing more can be counted: so much must be removed of a tenant first."""

    folder: str
    nbytes: int
    n_responses: int


class _Read(NamedTuple):
    use: Use
    revision: int  # 0: there is no record


def folder_of(tenant: str) -> str:
    """The name under which a tenant's responses are stored: a hash, because names of tenants are no keys."""
    digest = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"fleet-responses")
    return digest.hexdigest()


class ResponseUse:
    """One per orchestrator. `wall`: s since 1970."""

    def __init__(self, store: CoordinationStore, tenant_bytes: int, max_bytes: int, wall: Callable[[], float]) -> None:
        self._store = store
        self._tenant_bytes = min(tenant_bytes, max_bytes)
        self._max_bytes = max_bytes
        self._wall = wall
        self._gone: deque[str] = deque()  # leases
        self._changing = asyncio.Lock()  # all change one record: only other orchestrators may be in the way

    async def reserve(self, folder: str, nbytes: int) -> Shortage | None:
        """Count a response that is about to be written; or what must be removed first. Raises `StarlingError`."""
        async with self._turn():
            return await self._reserve(folder, nbytes)

    async def _reserve(self, folder: str, nbytes: int) -> Shortage | None:
        for _ in range(TRIES):
            mine, every = await self._read(USE + folder), await self._read(ALL)
            over = mine.use.bytes + nbytes - self._tenant_bytes
            if over > 0:  # a sixteenth more, so that not every response lists the others
                return Shortage(folder, min(mine.use.bytes, over + self._tenant_bytes // 16), 0)
            over, too_many = every.use.bytes + nbytes - self._max_bytes, every.use.count + 1 - MAX_COUNT
            if over > 0 or too_many > 0:
                largest, use = await self._largest()
                more = Shortage(largest, max(0, over) + self._max_bytes // 64, max(0, too_many))
                return more._replace(nbytes=min(use.bytes, more.nbytes))
            if not mine.revision:
                await self._check_tenants()
            if await self._write(folder, mine, every, nbytes, 1):
                return None
            await asyncio.sleep(random.uniform(0.0, TRY_PAUSE_S))
        raise _busy()

    async def release(self, folder: str, nbytes: int, count: int) -> None:
        """Count responses that have been removed, or were not written. Raises `StarlingError`."""
        if not count:
            return
        async with self._turn():
            for _ in range(TRIES):
                mine, every = await self._read(USE + folder), await self._read(ALL)
                if await self._write(folder, mine, every, -nbytes, -count):
                    return
                await asyncio.sleep(random.uniform(0.0, TRY_PAUSE_S))
        raise _busy()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the changes that this orchestrator has begun. Raises `StorageUnavailable` if that takes long."""
        try:
            await asyncio.wait_for(self._changing.acquire(), TURN_S)
        except TimeoutError:
            raise _busy() from None
        try:
            yield
        finally:
            self._changing.release()

    async def settle(self, folder: str, use: Use, nbytes: int, count: int) -> bool:
        """Count what was found of a tenant, unless its record has changed since it was `use`. Call with its lock."""
        mine, every = await self._read(USE + folder), await self._read(ALL)
        if mine.use != use:
            return False
        return await self._write(folder, mine, every, nbytes - use.bytes, count - use.count)

    async def tenants(self) -> dict[str, Use]:
        """The records, by folder."""
        items, _ = await answer(self._store.scan(USE))
        return {item.key.removeprefix(USE): _decode(item.value) for item in items}

    @contextlib.asynccontextmanager
    async def removing(self, folder: str) -> AsyncIterator[None]:
        """Exclude other removals of the tenant. Raises `StorageUnavailable` if that is not possible in time."""
        lease = await answer(self._store.grant(LOCK_S))
        try:
            async with asyncio.timeout(REMOVE_S):
                while await answer(self._store.swap(LOCK + folder, 0, b"1", lease)) is None:
                    await asyncio.sleep(PAUSE_S)
                yield
        except TimeoutError:
            raise StorageUnavailable(f"responses were not removed within {REMOVE_S:g} s", retry_after_s=1.0) from None
        finally:
            with contextlib.suppress(StorageUnavailable):  # its time ends it
                await answer(self._store.revoke(lease))

    async def bury(self, name: str) -> None:
        """A client deletes a response, FOLDER/ID. Raises `StorageUnavailable`."""
        lease = await answer(self._store.grant(GONE_S))
        await answer(self._store.swap(GONE + name, 0, b"1", lease))
        self._gone.append(lease)
        if len(self._gone) > MAX_GONE:
            with contextlib.suppress(StorageUnavailable):  # its time ends it
                await answer(self._store.revoke(self._gone.popleft()))

    async def is_buried(self, name: str) -> bool:
        """Whether a client has deleted a response lately. Raises `StorageUnavailable`."""
        return await answer(self._store.get(GONE + name)) is not None

    async def _largest(self) -> tuple[str, Use]:
        records = await self.tenants()
        if not records:
            raise _busy()
        return max(records.items(), key=lambda one: one[1].bytes)

    async def _check_tenants(self) -> None:
        """There is a new tenant: forget those that have nothing. Raises `ResourceError` if there are too many."""
        items, _ = await answer(self._store.scan(USE))
        if len(items) < MAX_TENANTS:
            return
        empty = [item for item in items if not _decode(item.value).count]
        if not empty:
            raise ResourceError(
                f"{MAX_TENANTS} tenants have stored responses, the most of a fleet; delete some, or send "
                '"store": false',
                "store",
            )
        await answer(self._store.swap(empty[0].key, empty[0].revision, None))

    async def _read(self, key: str) -> _Read:
        item = await answer(self._store.get(key))
        return _Read(_decode(item.value), item.revision) if item is not None else _Read(Use(), 0)

    async def _write(self, folder: str, mine: _Read, every: _Read, nbytes: int, count: int) -> bool:
        now = self._wall()
        changes = [
            Change(key, msgspec.json.encode(_added(read.use, nbytes, count, now)))
            for key, read in ((USE + folder, mine), (ALL, every))
        ]
        conditions = [Condition(USE + folder, mine.revision), Condition(ALL, every.revision)]
        return await answer(self._store.transact(conditions, changes)) is not None


def _added(use: Use, nbytes: int, count: int, now: float) -> Use:
    return Use(bytes=max(0, use.bytes + nbytes), count=max(0, use.count + count), at=now)


def _decode(value: bytes) -> Use:
    try:
        return msgspec.json.decode(value, type=Use)
    except DECODE_ERRORS:
        return Use()


def _busy() -> StorageUnavailable:
    return StorageUnavailable(
        "the fleet's orchestrators store too many responses at the same time; try again", "store", retry_after_s=1.0
    )


async def answer(call: Awaitable[T]) -> T:
    """Raises `StorageUnavailable` if the store does not answer."""
    try:
        async with asyncio.timeout(STORE_S):
            return await call
    except TimeoutError:
        message = f"the coordination store (fleet.store) has not answered within {STORE_S:g} s"
        raise StorageUnavailable(message, "store", retry_after_s=1.0) from None
