"""Stored responses of a fleet, in a blob store that all orchestrators share (tenant_blobs.py).

A blob has the response, its whole conversation and the items of its input, so that removing one ends no other.  It is
written once: of two orchestrators that store the same response, one finds that the other has.  Expired ones are not
found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.errors import Conflict, ResourceError, StorageUnavailable
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.responses.tenant_blobs import CHECKSUM_BYTES, TenantBlobs
from stages.orchestrator.responses.use import folder_of


class Stored(msgspec.Struct, array_like=True, frozen=True):
    """The contents of a blob."""

    id: str
    at: float  # s since 1970 when it was stored
    body: bytes  # JSON, the response
    conversation: bytes  # MessagePack, messages of the chat template without instructions
    inputs: bytes  # JSON, the items of the input
    digest: bytes = b""  # of the body of a request in the background, or of one with an Idempotency-Key

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages up to the response, with its own."""
        return msgspec.msgpack.decode(self.conversation, type=list[dict[str, Any]])

    @property
    def status(self) -> str:
        """How it has ended."""
        return str(msgspec.json.decode(self.body, type=dict[str, Any])["status"])


class ResponseStore:
    """One per orchestrator. `wall`: s since 1970."""

    def __init__(self, place: TenantBlobs, wall: Callable[[], float]) -> None:
        self._place = place
        self._wall = wall

    def check_fits(self, nbytes: int) -> None:
        """Raises `ResourceError` for a response of so many bytes, which its tenant can never store."""
        if nbytes > self._place.most_bytes:
            raise ResourceError(
                f"the response has {nbytes} bytes with its conversation; {self._place.most_bytes} may be stored "
                '(stored_responses.tenant_mb and max_size_mb): send a shorter conversation, or "store": false',
                "store",
            )

    async def put(
        self, tenant: str, response_id: str, body: bytes, conversation: bytes, inputs: bytes, digest: bytes = b""
    ) -> bool:
        """Store a response. False: it is there, and stays as it is. Raises `StarlingError`."""
        content = msgspec.msgpack.encode(Stored(response_id, self._wall(), body, conversation, inputs, digest))
        self.check_fits(len(content) + CHECKSUM_BYTES)
        folder = folder_of(tenant)
        key = f"{folder}/{response_id}"
        if await self._place.is_there(key):  # a stream that is read again needs no room
            return False
        try:
            await self._place.write(folder, key, content)
        except Conflict:
            return False
        return True

    async def get(self, tenant: str, response_id: str) -> Stored | None:
        """A response; None: there is none. Raises `StorageUnavailable`."""
        key = f"{folder_of(tenant)}/{response_id}"
        content = await self._place.read(key)
        if content is None:
            return None
        try:
            stored = msgspec.msgpack.decode(content, type=Stored)
        except DECODE_ERRORS as error:
            raise StorageUnavailable(f"{key} cannot be read: {error}") from None
        return stored if stored.at + self._place.ttl_s >= self._wall() else None

    async def has(self, tenant: str, response_id: str) -> bool:
        """Whether a response is stored, maybe an expired one. Raises `StorageUnavailable`."""
        return await self._place.is_there(f"{folder_of(tenant)}/{response_id}")

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Remove a response. False: there is none. Raises `StarlingError`."""
        folder = folder_of(tenant)
        return await self._place.remove_response(folder, f"{folder}/{response_id}")

    async def was_deleted(self, tenant: str, response_id: str) -> bool:
        """Whether a client has deleted a response lately. Raises `StorageUnavailable`."""
        return await self._place.use.is_buried(f"{folder_of(tenant)}/{response_id}")
