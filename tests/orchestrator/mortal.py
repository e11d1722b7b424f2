"""Orchestrators that share stores in one process: a test decides the order of their operations, and when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pipeline.blobs.interface import BlobInfo, BlobStore, Data
from pipeline.config.schema import StoredResponsesConfig
from pipeline.coordination.interface import Change, Condition, Item
from pipeline.coordination.memory import MemoryStore
from pipeline.errors import Conflict, NotFound
from stages.orchestrator.responses.heads import Heads
from stages.orchestrator.responses.jobs import Jobs
from stages.orchestrator.responses.shared import SharedResponses
from stages.orchestrator.responses.tenant_blobs import TenantBlobs
from stages.orchestrator.responses.use import ResponseUse

MIB = 1 << 20
T = TypeVar("T")
NEVER = 1 << 30


class DeathError(BaseException):
    """The process is killed: nothing of it goes on."""


class Wall:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class MemoryBlobs(BlobStore):
    """Blobs in memory, with the times of the test's clock."""

    address = "memory"

    def __init__(self, wall: Wall) -> None:
        self._wall = wall
        self.all: dict[str, tuple[bytes, float]] = {}

    async def size(self, key: str) -> int:
        return len(self._find(key))

    async def get(self, key: str, offset: int, nbytes: int) -> bytes:
        return self._find(key)[offset : offset + nbytes]

    async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
        if key in self.all and not replace:
            raise Conflict(key)
        self.all[key] = bytes(data), self._wall()

    async def scan(self, folder: str) -> list[BlobInfo]:
        found = sorted((key, one) for key, one in self.all.items() if key.startswith(f"{folder}/"))
        return [BlobInfo(key, len(data), modified) for key, (data, modified) in found]

    async def delete(self, key: str) -> None:
        self.all.pop(key, None)

    def _find(self, key: str) -> bytes:
        if key not in self.all:
            raise NotFound(key)
        return self.all[key][0]


class Order:
    """Who goes next, of all that wait for a store. Outside of `run` no operation waits."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self.is_on = False

    async def turn(self) -> None:
        if self.is_on:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            await mine

    async def run(self, works: Sequence[Awaitable[object]], choose: Callable[[int], int]) -> list[object]:
        """Let `choose` decide between the works, operation by operation; their results, or what they have raised."""
        self.is_on = True
        tasks = [asyncio.ensure_future(work) for work in works]
        while not all(task.done() for task in tasks):
            for _ in range(12):  # until all wait
                await asyncio.sleep(0)
            self._waiting = [one for one in self._waiting if not one.done()]
            if self._waiting:
                self._waiting.pop(choose(len(self._waiting))).set_result(None)
        self.is_on = False
        for one in self._waiting:
            if not one.done():
                one.set_result(None)
        return [task.exception() or task.result() for task in tasks]


class Mortal:
    """Counts the operations of one orchestrator, which dies before or after the one with a number."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.n_operations = 0
        self.dies_before = self.dies_after = NEVER
        self.is_dead = False

    async def operate(self, operation: Callable[[], Awaitable[T]]) -> T:
        await self._order.turn()
        if not self.is_dead:
            self.n_operations += 1
            self.is_dead = self.n_operations == self.dies_before
        if self.is_dead:
            raise DeathError
        result = await operation()
        if self.n_operations == self.dies_after:
            self.is_dead = True
            raise DeathError
        return result


class MortalStore(MemoryStore):
    """A view of a store by an orchestrator."""

    def __init__(self, shared: MemoryStore, mortal: Mortal) -> None:
        self._shared, self._mortal = shared, mortal

    async def get(self, key: str) -> Item | None:
        return await self._mortal.operate(lambda: self._shared.get(key))

    async def scan(self, prefix: str) -> tuple[list[Item], int]:
        return await self._mortal.operate(lambda: self._shared.scan(prefix))

    async def transact(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> int | None:
        return await self._mortal.operate(lambda: self._shared.transact(conditions, changes))

    async def grant(self, ttl_s: float) -> str:
        return await self._mortal.operate(lambda: self._shared.grant(ttl_s))

    async def renew(self, lease: str) -> bool:
        return await self._mortal.operate(lambda: self._shared.renew(lease))

    async def revoke(self, lease: str) -> None:
        await self._mortal.operate(lambda: self._shared.revoke(lease))


class MortalBlobs(BlobStore):
    """A view of blobs by an orchestrator."""

    address = "memory"

    def __init__(self, shared: MemoryBlobs, mortal: Mortal) -> None:
        self._shared, self._mortal = shared, mortal

    async def size(self, key: str) -> int:
        return await self._mortal.operate(lambda: self._shared.size(key))

    async def get(self, key: str, offset: int, nbytes: int) -> bytes:
        return await self._mortal.operate(lambda: self._shared.get(key, offset, nbytes))

    async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
        await self._mortal.operate(lambda: self._shared.put(key, data, replace=replace))

    async def scan(self, folder: str) -> list[BlobInfo]:
        return await self._mortal.operate(lambda: self._shared.scan(folder))

    async def delete(self, key: str) -> None:
        await self._mortal.operate(lambda: self._shared.delete(key))


class MortalOrchestrator(Mortal):
    """What one has of responses and conversations."""

    def __init__(self, world: World) -> None:
        super().__init__(world.order)
        store, blobs = MortalStore(world.store, self), MortalBlobs(world.blobs, self)
        use = ResponseUse(store, world.tenant_bytes, world.max_bytes, world.wall)
        place = TenantBlobs(blobs, use, Heads(store), world.config, world.wall)
        jobs = Jobs(store, blobs, world.wall)
        self.shared = SharedResponses(place, jobs, store, world.wall)


class World:
    """What the orchestrators of a fleet share."""

    def __init__(self, tenant_mb: int = 4, max_mb: int = 8, ttl_s: int = 3600) -> None:
        self.wall = Wall()
        self.order = Order()
        self.store = MemoryStore()
        self.blobs = MemoryBlobs(self.wall)
        self.tenant_bytes, self.max_bytes = tenant_mb * MIB, max_mb * MIB
        self.config = StoredResponsesConfig(tenant_mb=tenant_mb, max_size_mb=max_mb, ttl_s=ttl_s)

    def orchestrator(self) -> MortalOrchestrator:
        return MortalOrchestrator(self)
