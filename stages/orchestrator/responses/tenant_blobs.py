"""Blobs of tenants in a blob store that all orchestrators share: `FOLDER/NAME`, a folder for each tenant.

A blob is a response, or a value of a conversation (heads.py).  It is counted before it is written and until it is
removed (use.py).  Beyond the bounds of a tenant, or of all tenants, the oldest blobs are removed: a conversation's blob
is as old as the last change of the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import xxhash

from pipeline.blobs.interface import BlobInfo, BlobStore
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import ConfigError, Conflict, NotFound, ResourceError, StarlingError, StorageUnavailable
from stages.orchestrator.responses.heads import Head, Heads, conversation_of
from stages.orchestrator.responses.use import ResponseUse, Shortage, Use

log = logging.getLogger("starling.orchestrator")

ENTRY_BYTES = 4096  # least bytes that a blob counts as
CHECKSUM_BYTES = 8
MAX_BLOB_BYTES = 64 << 20
SETTLED_S = 120.0  # since the last change of a tenant's record: then what is counted can be compared with what is there
ABANDONED_S = 600.0  # age of a conversation's blob that no head names after which its change is taken for dead
MAX_ATTEMPTS = 8  # to make room
PUT_S = 60.0  # for the blob store to take a blob, less than SETTLED_S
AT_ONCE = 32  # removals
INLINE_BYTES = 256 << 10  # a larger blob is hashed, decoded and encoded on a thread
T = TypeVar("T")


def counted(nbytes: int) -> int:
    """The bytes that a blob counts as."""
    return max(ENTRY_BYTES, nbytes)


class MaybeStored(StorageUnavailable):
    """The blob store has not answered: the blob may be there now, or later."""


class _Leaving(NamedTuple):
    key: str
    nbytes: int  # as counted


class TenantBlobs:
    """One per orchestrator. `wall`: s since 1970."""

    def __init__(
        self,
        blobs: BlobStore,
        use: ResponseUse,
        heads: Heads,
        config: StoredResponsesConfig,
        wall: Callable[[], float],
    ) -> None:
        self.use = use
        self.heads = heads
        self.ttl_s = config.ttl_s
        self.most_bytes = min(config.tenant_mb << 20, config.max_size_mb << 20, MAX_BLOB_BYTES)  # of a blob
        self._blobs = blobs
        self._wall = wall

    async def write(self, folder: str, key: str, content: bytes, besides: str = "") -> int:
        """Store a blob; the bytes that are counted for it. `besides`: a blob that does not leave for it.

        Raises `Conflict` if it is there, `MaybeStored`, and other `StarlingError`s: then it is not there.
        """
        data = await inline_or_not(len(content), partial(_sealed, content))
        nbytes = counted(len(data))
        await self._reserve(folder, nbytes, besides)
        try:
            async with asyncio.timeout(PUT_S):
                await self._blobs.put(key, data)
        except Conflict:
            await self.use.release(folder, nbytes, 1)
            raise
        except (ConfigError, ResourceError) as error:
            await self.use.release(folder, nbytes, 1)
            raise StorageUnavailable(f"the response could not be stored: {error.message}", "store") from None
        except (StorageUnavailable, TimeoutError) as error:
            is_there = True
            with contextlib.suppress(StarlingError):  # else `sweep` corrects what is counted
                is_there = await self.is_there(key)
                if not is_there:
                    await self.use.release(folder, nbytes, 1)
            if isinstance(error, TimeoutError):
                raise MaybeStored(f"the response was not stored within {PUT_S:g} s", "store") from None
            if is_there:
                raise MaybeStored(error.message, error.param) from None
            raise
        return nbytes

    async def is_there(self, key: str) -> bool:
        """Whether there is such a blob. Raises `StorageUnavailable`."""
        try:
            async with asyncio.timeout(PUT_S):
                await self._blobs.size(key)
        except NotFound:
            return False
        except ConfigError as error:
            raise StorageUnavailable(f"the response could not be stored: {error.message}", "store") from None
        except TimeoutError:
            raise StorageUnavailable(f"the blob store has not answered within {PUT_S:g} s", "store") from None
        return True

    async def read(self, key: str) -> bytes | None:
        """The contents of a blob; None: there is none. Raises `StorageUnavailable`."""
        try:
            data = await self._blobs.read(key, MAX_BLOB_BYTES)
        except NotFound:
            return None
        return await inline_or_not(len(data), partial(_opened, key, data))

    async def take_back(self, folder: str, key: str, nbytes: int) -> None:
        """Remove a blob that only the caller removes. `nbytes`: as counted. Raises `StarlingError`."""
        await self._blobs.delete(key)
        await self.use.release(folder, nbytes, 1)

    async def adopt(self, folder: str, name: str, head: Head) -> bool:
        """Let a conversation whose record names a blob that is gone have its newest one. False: there is none.

        A power cut can take the last writes of the coordination store, after which the former blob was removed.  Raises
        `StorageUnavailable`.
        """
        listed = await self._blobs.scan(folder)
        others = [blob for blob in listed if conversation_of(blob.key) == name and blob.key != head.key]
        if not others:
            return False
        newest = max(others, key=lambda blob: (blob.modified, blob.key))
        log.warning("a conversation has its newest blob again", extra={"blob": newest.key})
        await self.heads.swap(folder, name, head, newest.key, counted(newest.nbytes))
        return True

    async def remove_response(self, folder: str, key: str) -> bool:
        """Remove a blob that a client deletes. False: there is none. Raises `StarlingError`."""
        async with self.use.removing(folder):
            try:
                nbytes = await self._blobs.size(key)
            except NotFound:
                return False
            await self.use.bury(key)  # before: else who reads its stream might store it again
            await self._remove(folder, [BlobInfo(key, nbytes)])
        return True

    # ---------------------------------------------------------------- what leaves

    async def sweep(self) -> None:
        """Remove what has expired, and correct what is counted. One orchestrator does it now and then."""
        for folder, use in (await self.use.tenants()).items():
            try:
                async with self.use.removing(folder):
                    await self._sweep(folder, use)
            except StarlingError as error:
                log.warning("stored responses were not swept", extra={"reason": error.message})

    async def _sweep(self, folder: str, use: Use) -> None:
        listed = await self._blobs.scan(folder)
        if use.at + SETTLED_S < self._wall():
            nbytes = sum(counted(blob.nbytes) for blob in listed)
            if (nbytes, len(listed)) != (use.bytes, use.count):
                await self.use.settle(folder, use, nbytes, len(listed))
        await self._remove(folder, [blob for blob in listed if blob.modified + self.ttl_s < self._wall()])
        known = {blob.key for blob in listed}
        for name, head in (await self.heads.all(folder)).items():
            if head.key in known or await self.is_there(head.key):
                continue
            if not await self.adopt(folder, name, head):  # the blob store has lost it
                await self.heads.remove(folder, name, head)
        await self._remove_abandoned(folder, listed, await self.heads.all(folder))

    async def _remove_abandoned(self, folder: str, listed: list[BlobInfo], heads: dict[str, Head]) -> None:
        """Remove blobs of conversations that no head names. `settle` counts them later: their writer may, too."""
        for blob in listed:
            name = conversation_of(blob.key)
            if not name or blob.modified + ABANDONED_S >= self._wall():
                continue
            if name in heads:
                head = heads[name]
                if head.key == blob.key:
                    continue
                head_now = await self.heads.fence(folder, name)
                if head_now is None or head_now.key == blob.key:
                    continue
            elif await self.heads.find(folder, name) is not None:
                continue
            await self._blobs.delete(blob.key)

    async def _reserve(self, folder: str, nbytes: int, besides: str) -> None:
        for _ in range(MAX_ATTEMPTS):
            short = await self.use.reserve(folder, nbytes)
            if short is None:
                return
            async with self.use.removing(short.folder):
                again = await self.use.reserve(folder, nbytes)  # another orchestrator may have made room meanwhile
                if again is None:
                    return
                if again.folder == short.folder:
                    await self._shrink(again, besides)
        raise StorageUnavailable("there is no room for the response now; try again", "store", retry_after_s=1.0)

    async def _shrink(self, short: Shortage, besides: str) -> None:
        """Remove the oldest blobs of a tenant."""
        listed = sorted(await self._blobs.scan(short.folder), key=lambda blob: (blob.modified, blob.key))
        nbytes = n_responses = 0
        while listed and (nbytes < short.nbytes or n_responses < short.n_responses):
            leaving: list[BlobInfo] = []
            expected = 0
            while listed and (nbytes + expected < short.nbytes or n_responses + len(leaving) < short.n_responses):
                blob = listed.pop(0)
                if blob.key != besides:
                    leaving.append(blob)
                    expected += counted(blob.nbytes)
            gone = await self._remove(short.folder, leaving)
            nbytes += sum(blob.nbytes for blob in gone)
            n_responses += len(gone)

    async def _remove(self, folder: str, blobs: list[BlobInfo]) -> list[_Leaving]:
        """Remove blobs, and count each part of them when it is gone; those that are. Call with the tenant's lock."""
        removed: list[_Leaving] = []
        for begin in range(0, len(blobs), AT_ONCE):
            part = blobs[begin : begin + AT_ONCE]
            may_go = await asyncio.gather(*(self._may_go(folder, blob.key) for blob in part))
            gone = [_Leaving(blob.key, counted(blob.nbytes)) for blob, may in zip(part, may_go) if may]
            await asyncio.gather(*(self._blobs.delete(blob.key) for blob in gone))
            await self.use.release(folder, sum(blob.nbytes for blob in gone), len(gone))
            removed += gone
        return removed

    async def _may_go(self, folder: str, key: str) -> bool:
        """End a blob's conversation, if it is its present value. Others are removed by who has written the next one."""
        name = conversation_of(key)
        if not name:
            return True
        head = await self.heads.find(folder, name)
        return head is not None and head.key == key and await self.heads.remove(folder, name, head)


async def inline_or_not(nbytes: int, work: Callable[[], T]) -> T:
    """Do what takes a time that grows with `nbytes`, on a thread if they are many."""
    return work() if nbytes <= INLINE_BYTES else await asyncio.to_thread(work)


def _sealed(content: bytes) -> bytes:
    return xxhash.xxh3_64_digest(content) + content


def _opened(key: str, data: bytes) -> bytes:
    content = data[CHECKSUM_BYTES:]
    if data[:CHECKSUM_BYTES] != xxhash.xxh3_64_digest(content):
        raise StorageUnavailable(f"{key} is damaged")
    return content
