"""Conversations of a fleet, in the blob store of the responses (tenant_blobs.py), which all orchestrators share.

    change   read the present value, write the next one beside it, swap the head (heads.py), remove the former one

Of two orchestrators that change a conversation at once, the second one begins again with what the first has made: no
change is lost.  A process that dies leaves the conversation as it was, or changed, and a blob that `sweep` removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from pipeline.api.conversation_object import check_bounds, missing, missing_item
from pipeline.api.requests.conversations import ID_PREFIX, ConversationItem
from pipeline.errors import StarlingError, StorageUnavailable
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.responses.conversation import StoredConversation
from stages.orchestrator.responses.heads import Head, is_conversation, new_blob
from stages.orchestrator.responses.tenant_blobs import INLINE_BYTES, TenantBlobs, counted, inline_or_not
from stages.orchestrator.responses.use import folder_of
from stages.orchestrator.slots import to_its_end

log = logging.getLogger("starling.orchestrator")

MAX_BYTES = 8 << 20  # of a conversation, which each change writes as a whole: what a response can continue, twice
MAX_LARGE_READS = 8  # at once, of conversations that are decoded on a thread
TRIES = 32  # of a change at which other orchestrators change the same conversation
TRY_PAUSE_S = 0.05  # at most, between two of them
READ_TRIES = 8  # of a read at which the conversation changes
SWAP_TRIES = 3  # of a change whose answer was lost: of two with the same condition only one is made
T = TypeVar("T")

MakeNext = Callable[[StoredConversation, float], StoredConversation]  # the present value, and the time


class ConversationStore:
    """One per orchestrator. `wall`: s since 1970. What clients ask of it is not ended when they leave."""

    def __init__(self, place: TenantBlobs, wall: Callable[[], float]) -> None:
        self._place = place
        self._wall = wall
        self._large = asyncio.Semaphore(MAX_LARGE_READS)
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def most_bytes(self, beside: int = 0) -> int:
        """The most bytes of a conversation, of which two values are stored for a moment. `beside`: with a response."""
        return min(MAX_BYTES, max(0, self._place.most_bytes - beside) // 2)

    async def create(self, tenant: str, metadata: bytes, items: Sequence[ConversationItem]) -> StoredConversation:
        """Store a new conversation. Raises `StarlingError`, `TooLargeError`."""
        now, name = self._wall(), f"{ID_PREFIX}{secrets.token_hex(24)}"
        made = StoredConversation(id=name, created=int(now), used=now, metadata=metadata)
        made = made.with_items(items, now, self.most_bytes())
        await to_its_end(self._replace(folder_of(tenant), None, made))
        return made

    async def get(self, tenant: str, name: str, field: str = "") -> StoredConversation:
        """A conversation. `field`: of the request that names it. Raises `NotFound`, `StorageUnavailable`."""
        found = await self._find(folder_of(tenant), name)
        if found is None:
            raise missing(name, field)
        return found[1]

    async def add(self, tenant: str, name: str, items: Sequence[ConversationItem]) -> None:
        """Add items to a conversation. Raises `StarlingError`, `TooLargeError`."""
        bound = self.most_bytes()
        check_bounds(len(items), sum(item.size for item in items), bound)  # before it waits for others
        await self._change(tenant, name, lambda value, now: value.with_items(items, now, bound))

    async def set_metadata(self, tenant: str, name: str, metadata: bytes) -> StoredConversation:
        """Replace the metadata; the conversation then. Raises `StarlingError`."""
        return await self._change(tenant, name, lambda value, now: value.changed(now, metadata=metadata))

    async def delete_item(self, tenant: str, name: str, item_id: str) -> StoredConversation:
        """Drop an item; the conversation then. Raises `StarlingError`."""

        def make(value: StoredConversation, now: float) -> StoredConversation:
            if value.find(item_id) is None:
                raise missing_item(name, item_id)
            return value.without_item(item_id, now)

        return await self._change(tenant, name, make)

    async def add_response(
        self,
        tenant: str,
        name: str,
        response_id: str,
        items: Sequence[ConversationItem],
        nbytes: int,
        digest: bytes = b"",
    ) -> bool:
        """Add the items of a response, once; none if the conversation is gone. False: it has had them.

        `nbytes`: what is stored beside.  `digest`: of the request's body, if it has a key.  Raises `StarlingError`,
        `TooLargeError`.
        """
        bound, is_added = self.most_bytes(nbytes), True

        def make(value: StoredConversation, now: float) -> StoredConversation:
            nonlocal is_added
            made = value.with_response(response_id, items, now, bound, digest)
            is_added = made is not value
            return made

        await self._change_if_there(tenant, name, make)
        return is_added

    async def withdraw_response(self, tenant: str, name: str, response_id: str, digest: bytes = b"") -> None:
        """The response has failed or was cancelled: it has added nothing, and will not. Raises `StarlingError`."""
        await self._change_if_there(tenant, name, lambda value, now: value.without_response(response_id, now, digest))

    async def take_out_response(self, tenant: str, name: str, response_id: str) -> None:
        """The response could not be stored: it may add its items later. Raises `StarlingError`."""
        await self._change_if_there(tenant, name, lambda value, now: value.taking_out(response_id, now))

    async def forget_response(self, tenant: str, name: str, response_id: str) -> None:
        """The response was deleted: its key may make another one, if no item of it is left. Raises `StarlingError`."""
        await self._change_if_there(tenant, name, lambda value, now: value.forgetting(response_id, now))

    async def delete(self, tenant: str, name: str) -> None:
        """Drop a conversation with its items. Raises `NotFound`, `StarlingError`."""
        folder = folder_of(tenant)
        for _ in range(TRIES):
            head = await self._place.heads.find(folder, name) if is_conversation(name) else None
            if head is None:
                raise missing(name)
            if await to_its_end(self._end(folder, name, head)):
                return
        raise _busy(name)

    async def _end(self, folder: str, name: str, head: Head) -> bool:
        if not await self._place.heads.remove(folder, name, head):
            return False
        await self._take_back(folder, head)
        return True

    # ---------------------------------------------------------------- values

    async def _change_if_there(self, tenant: str, name: str, make: MakeNext) -> None:
        with contextlib.suppress(_GoneError):
            await self._change(tenant, name, make, _GoneError())

    async def _change(
        self, tenant: str, name: str, make: MakeNext, gone: Exception | None = None
    ) -> StoredConversation:
        """Make the next value. Raises what `make` raises, `StarlingError`, and `gone` if there is no conversation."""
        return await to_its_end(self._change_in_turn(folder_of(tenant), name, make, gone or missing(name)))

    async def _change_in_turn(self, folder: str, name: str, make: MakeNext, gone: Exception) -> StoredConversation:
        lock = self._changing.setdefault(f"{folder}/{name}", asyncio.Lock())  # only others may be in the way
        async with lock:
            for _ in range(TRIES):
                found = await self._find(folder, name)
                if found is None:
                    raise gone
                head, value = found
                made = make(value, self._wall())
                if made is value or await self._replace(folder, head, made):
                    return made
                await asyncio.sleep(random.uniform(0.0, TRY_PAUSE_S))
        raise _busy(name)

    async def _find(self, folder: str, name: str) -> tuple[Head, StoredConversation] | None:
        """The present value; None: there is none, or it has expired. Raises `StorageUnavailable`."""
        if not is_conversation(name):
            return None
        before: Head | None = None
        for _ in range(READ_TRIES):
            head = await self._place.heads.find(folder, name)
            if head is None:
                return None
            if head == before:  # a store has lost its blob, or its last record
                if not await self._place.adopt(folder, name, head):
                    return None
                continue
            async with self._large if head.nbytes > INLINE_BYTES else contextlib.nullcontext():
                value = await self._read(head)
            if value is not None:
                return (head, value) if value.used + self._place.ttl_s >= self._wall() else None
            before = head  # it has changed, or has ended
        raise _busy(name)

    async def _read(self, head: Head) -> StoredConversation | None:
        content = await self._place.read(head.key)
        if content is None:
            return None
        return await inline_or_not(len(content), partial(_decode, head.key, content))

    async def _replace(self, folder: str, before: Head | None, value: StoredConversation) -> bool:
        """Write the next value. False: another one has come first. Raises `StarlingError`.

        If the coordination store has not answered, the blob stays: the swap may have been made, or may still be.
        """
        content = await inline_or_not(value.nbytes, partial(msgspec.msgpack.encode, value))
        key = new_blob(folder, value.id)
        nbytes = await self._place.write(folder, key, content, before.key if before is not None else "")
        if await self._swap(folder, value.id, before, key, nbytes):
            if before is not None:
                await self._take_back(folder, before)
            return True
        await self._take_back(folder, Head(key, nbytes, 0))
        return False

    async def _swap(self, folder: str, name: str, before: Head | None, key: str, nbytes: int) -> bool:
        """See `Heads.swap`. If its answer was lost, the record says whether it was made."""
        revision = before.revision if before is not None else 0
        for _ in range(SWAP_TRIES - 1):
            try:
                return await self._place.heads.swap(folder, name, before, key, nbytes)
            except StorageUnavailable:
                now = await self._place.heads.find(folder, name)
                if now is not None and now.key == key:
                    return True
                if (now.revision if now is not None else 0) != revision:
                    raise  # ours may have come before that of another one
        return await self._place.heads.swap(folder, name, before, key, nbytes)

    async def _take_back(self, folder: str, head: Head) -> None:
        try:
            await self._place.take_back(folder, head.key, counted(head.nbytes))
        except StarlingError as error:  # `sweep` removes it
            log.warning("a former value of a conversation is left", extra={"reason": error.message})


class _GoneError(Exception):
    """There is no conversation any more."""


def _decode(key: str, content: bytes) -> StoredConversation:
    try:
        return msgspec.msgpack.decode(content, type=StoredConversation)
    except DECODE_ERRORS as error:
        raise StorageUnavailable(f"{key} cannot be read: {error}") from None


def _busy(name: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"conversation {name} changes too often at this moment; try again", "conversation", retry_after_s=1.0
    )
