"""Which agent holds which file, in the coordination store.

    pieces/DIGEST/CHECKSUM/AGENT_ID    AgentRecord, with the agent's lease: it holds the file, or downloads it

The key ends with the agent's lease, so that a dead agent is asked for nothing.  It has digests, no names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Protocol

import msgspec

from pipeline.coordination.interface import MAX_CHANGES, Change, CoordinationStore
from pipeline.errors import StorageUnavailable
from pipeline.fleet.records import VERSION, AgentRecord, check_agent_id, encode
from shm.decoding import DECODE_ERRORS
from stages.agent.disk_threads import MODELS
from stages.agent.peers.holdings import FileKey, Holdings

log = logging.getLogger("starling.agent.pieces")

PREFIX = "pieces/"
MAX_FILES = 256  # that an agent announces; the last used ones
MAX_PEERS = 8  # that a download uses, chosen by chance
MAX_DECODED = 64  # records that are read for them, chosen by chance
PERIOD_S = 5.0  # between two checks of the files
TIMEOUT_S = 3.0  # of a call of the store


class Lease(Protocol):
    """That of the agent."""

    @property
    def lease_id(self) -> str:
        """In the store; "" while it is not valid."""


class Announcements:
    """Those of one agent, and a look at those of the others. `keep` runs for the agent's whole life."""

    def __init__(self, store: CoordinationStore, lease: Lease, record: AgentRecord, holdings: Holdings) -> None:
        self._store = store
        self._lease = lease
        self._record = record
        self._holdings = holdings
        self._changed = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []  # for the end of the next look
        self._lease_id = ""
        self._written: set[FileKey] = set()  # with that lease

    def changed(self) -> None:
        """Look at the files now."""
        self._changed.set()

    async def announced(self) -> None:
        """Look at the files now, and return when they are announced or the store has not answered."""
        ended = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await ended

    async def keep(self) -> None:
        """Announce without end. A store that does not answer is asked again."""
        while True:
            self._changed.clear()
            waiting, self._waiting = self._waiting, []
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self.write()
            except (StorageUnavailable, TimeoutError) as error:
                log.debug("files could not be announced", extra={"reason": str(error)})
            except Exception:  # such as of files that cannot be read now
                log.exception("files could not be announced")
            for ended in waiting:
                if not ended.done():  # cancelled
                    ended.set_result(None)
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def write(self) -> None:
        """Bring the keys into line with the files. Raises `StorageUnavailable`."""
        lease = self._lease.lease_id
        if not lease:
            return
        if lease != self._lease_id:
            self._lease_id, self._written = lease, set()
        wanted = set((await MODELS.run(self._holdings.keys))[:MAX_FILES])
        value = encode(self._record)
        todo = [(key, value) for key in wanted - self._written] + [(key, None) for key in self._written - wanted]
        for at in range(0, len(todo), MAX_CHANGES):
            part = todo[at : at + MAX_CHANGES]
            changes = [Change(self._key(key), value, lease if value else "") for key, value in part]
            if await self._store.transact((), changes) is None:
                return  # the lease has ended; the next one begins anew
            for key, given in part:
                (self._written.add if given else self._written.discard)(key)

    async def others(self, key: FileKey) -> list[AgentRecord]:
        """Other agents that hold or download a file, at most `MAX_PEERS`; none while the store does not answer."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                items, _ = await self._store.scan(_folder(key))
        except (StorageUnavailable, TimeoutError):
            return []
        items = [item for item in items if item.key != self._key(key)]
        chosen = random.sample(items, min(MAX_DECODED, len(items)))
        found = [record for item in chosen if (record := _decoded(item.key, item.value)) is not None]
        return found[:MAX_PEERS]

    def _key(self, key: FileKey) -> str:
        return _folder(key) + self._record.agent_id


def _folder(key: FileKey) -> str:
    return f"{PREFIX}{key.digest}/{key.checksum}/"


def _decoded(key: str, value: bytes) -> AgentRecord | None:
    """The record, if this release can use it and the key is its agent's."""
    try:
        record = msgspec.json.decode(value, type=AgentRecord)
    except DECODE_ERRORS:
        return None
    is_own = key.rpartition("/")[2] == record.agent_id and not check_agent_id(record.agent_id)
    return record if is_own and record.version == VERSION else None
