"""Responses in a blob store that all orchestrators share: `FOLDER/ID`, a folder for each tenant.

A blob has the response, its whole conversation and the items of its input, so that removing one ends no other.  It is
written once: of two orchestrators that store the same response, one finds that the other has.  Expired ones are not
found, and are removed by `sweep`; beyond the bounds of a tenant, or of all tenants, the oldest are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash

from pipeline.blobs.interface import BlobInfo, BlobStore
from pipeline.config.schema import StoredResponsesConfig
from pipeline.errors import ConfigError, Conflict, NotFound, ResourceError, StarlingError, StorageUnavailable
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.responses.use import ResponseUse, Shortage, Use, folder_of

log = logging.getLogger("starling.orchestrator")

ENTRY_BYTES = 4096  # least bytes that a response counts as
CHECKSUM_BYTES = 8
MAX_BLOB_BYTES = 64 << 20
SETTLED_S = 120.0  # since the last change of a tenant's record: then what is counted can be compared with what is there
MAX_ATTEMPTS = 8  # to make room
PUT_S = 60.0  # for the blob store to take a response, less than SETTLED_S
AT_ONCE = 32  # removals


class Stored(msgspec.Struct, array_like=True, frozen=True):
    """The contents of a blob, after a checksum."""

    id: str
    at: float  # s since 1970 when it was stored
    body: bytes  # JSON, the response
    conversation: bytes  # MessagePack, messages of the chat template without instructions
    inputs: bytes  # JSON, the items of the input
    digest: bytes = b""  # of the body of a request in the background

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages up to the response, with its own."""
        return msgspec.msgpack.decode(self.conversation, type=list[dict[str, Any]])

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items of the input."""
        return msgspec.json.decode(self.inputs, type=list[dict[str, Any]])


class ResponseStore:
    """One per orchestrator. `wall`: s since 1970."""

    def __init__(
        self, blobs: BlobStore, use: ResponseUse, config: StoredResponsesConfig, wall: Callable[[], float]
    ) -> None:
        self._blobs = blobs
        self._use = use
        self._ttl_s = config.ttl_s
        self._row_bytes = min(config.tenant_mb << 20, config.max_size_mb << 20, MAX_BLOB_BYTES)
        self._wall = wall

    def check_fits(self, nbytes: int) -> None:
        """Raises `ResourceError` for a response of so many bytes, which its tenant can never store."""
        if nbytes > self._row_bytes:
            raise ResourceError(
                f"the response has {nbytes} bytes with its conversation; {self._row_bytes} may be stored "
                '(stored_responses.tenant_mb and max_size_mb): send a shorter conversation, or "store": false',
                "store",
            )

    async def put(
        self, tenant: str, response_id: str, body: bytes, conversation: bytes, inputs: bytes, digest: bytes = b""
    ) -> None:
        """Store a response; no effect if it is there. Raises `StarlingError`."""
        content = msgspec.msgpack.encode(Stored(response_id, self._wall(), body, conversation, inputs, digest))
        data = xxhash.xxh3_64_digest(content) + content
        self.check_fits(len(data))
        folder, counted = folder_of(tenant), max(ENTRY_BYTES, len(data))
        key = f"{folder}/{response_id}"
        if await self._is_there(key):  # a stream that is read again needs no room
            return
        await self._reserve(folder, counted)
        try:
            async with asyncio.timeout(PUT_S):
                await self._blobs.put(key, data)
        except Conflict:
            await self._use.release(folder, counted, 1)
        except (ConfigError, ResourceError) as error:
            await self._use.release(folder, counted, 1)
            raise StorageUnavailable(f"the response could not be stored: {error.message}", "store") from None
        except (StorageUnavailable, TimeoutError) as error:
            with contextlib.suppress(StarlingError):  # else `sweep` corrects what is counted
                if not await self._is_there(key):
                    await self._use.release(folder, counted, 1)
            if isinstance(error, TimeoutError):
                raise StorageUnavailable(f"the response was not stored within {PUT_S:g} s", "store") from None
            raise

    async def _is_there(self, key: str) -> bool:
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

    async def get(self, tenant: str, response_id: str) -> Stored | None:
        """A response; None: there is none. Raises `StorageUnavailable`."""
        key = f"{folder_of(tenant)}/{response_id}"
        try:
            data = await self._blobs.read(key, MAX_BLOB_BYTES)
            if data[:CHECKSUM_BYTES] != xxhash.xxh3_64_digest(data[CHECKSUM_BYTES:]):
                raise StorageUnavailable(f"{key} is damaged")
            stored = msgspec.msgpack.decode(data[CHECKSUM_BYTES:], type=Stored)
        except NotFound:
            return None
        except DECODE_ERRORS as error:
            raise StorageUnavailable(f"{key} cannot be read: {error}") from None
        return stored if stored.at + self._ttl_s >= self._wall() else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Remove a response. False: there is none. Raises `StarlingError`."""
        folder = folder_of(tenant)
        key = f"{folder}/{response_id}"
        async with self._use.removing(folder):
            try:
                nbytes = await self._blobs.size(key)
            except NotFound:
                return False
            await self._use.bury(f"{folder}/{response_id}")  # before: else who reads its stream might store it again
            await self._remove(folder, [BlobInfo(key, nbytes)])
        return True

    async def was_deleted(self, tenant: str, response_id: str) -> bool:
        """Whether a client has deleted a response lately. Raises `StorageUnavailable`."""
        return await self._use.is_buried(f"{folder_of(tenant)}/{response_id}")

    async def sweep(self) -> None:
        """Remove what has expired, and correct what is counted. One orchestrator does it now and then."""
        for folder, use in (await self._use.tenants()).items():
            try:
                async with self._use.removing(folder):
                    await self._sweep(folder, use)
            except StarlingError as error:
                log.warning("stored responses were not swept", extra={"reason": error.message})

    async def _sweep(self, folder: str, use: Use) -> None:
        listed = await self._blobs.scan(folder)
        if use.at + SETTLED_S < self._wall():
            nbytes = sum(max(ENTRY_BYTES, blob.nbytes) for blob in listed)
            if (nbytes, len(listed)) != (use.bytes, use.count):
                await self._use.settle(folder, use, nbytes, len(listed))
        await self._remove(folder, [blob for blob in listed if blob.modified + self._ttl_s < self._wall()])

    async def _reserve(self, folder: str, nbytes: int) -> None:
        for _ in range(MAX_ATTEMPTS):
            short = await self._use.reserve(folder, nbytes)
            if short is None:
                return
            async with self._use.removing(short.folder):
                again = await self._use.reserve(folder, nbytes)  # another orchestrator may have made room meanwhile
                if again is None:
                    return
                if again.folder == short.folder:
                    await self._shrink(again)
        raise StorageUnavailable("there is no room for the response now; try again", "store", retry_after_s=1.0)

    async def _shrink(self, short: Shortage) -> None:
        """Remove the oldest responses of a tenant."""
        listed = sorted(await self._blobs.scan(short.folder), key=lambda blob: (blob.modified, blob.key))
        leaving: list[BlobInfo] = []
        nbytes = 0
        for blob in listed:
            if nbytes >= short.nbytes and len(leaving) >= short.n_responses:
                break
            leaving.append(blob)
            nbytes += max(ENTRY_BYTES, blob.nbytes)
        await self._remove(short.folder, leaving)

    async def _remove(self, folder: str, blobs: list[BlobInfo]) -> None:
        """Remove blobs, and count each part of them when it is gone. Call with the tenant's lock."""
        for begin in range(0, len(blobs), AT_ONCE):
            part = blobs[begin : begin + AT_ONCE]
            await asyncio.gather(*(self._blobs.delete(blob.key) for blob in part))
            await self._use.release(folder, sum(max(ENTRY_BYTES, blob.nbytes) for blob in part), len(part))
