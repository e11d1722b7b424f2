"""Stores what an engine has completed: the items in the conversation, and then the response.

A response that is stored has its items in its conversation, exactly once: they are added before, and adding them again
has no effect.  A process that dies in between has added the items of a response that the client has not received: the
orchestrator that sends the stream again stores it.  If it surely cannot be stored, they are taken out again.  Of one
that was cancelled or has failed meanwhile the items are withdrawn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pipeline.api.conversation_object import TooLargeError, stored_items
from pipeline.api.response_context import KeptResponse
from pipeline.api.response_object import answer_items
from pipeline.errors import StarlingError, StorageUnavailable
from stages.orchestrator.responses.conversation_store import ConversationStore
from stages.orchestrator.responses.store import ResponseStore
from stages.orchestrator.responses.tenant_blobs import MaybeStored

ENDED_WITHOUT_ITEMS = ("cancelled", "failed")
PUT_AGAIN_S = 5.0  # after which no other attempt begins: one may take a minute
PUT_PAUSES_S = (0.25, 0.5, 1.0, 2.0)  # between attempts to store a response whose items were added
FRAME_BYTES = 512  # of a stored response beside its parts, at most


_Store = Callable[[], Awaitable[bool]]


class Finished(NamedTuple):
    """What is used of a response."""

    id: str
    is_stored: bool
    conversation: str  # "": none
    output: list[dict[str, Any]]


def read_finished(body: bytes) -> Finished:
    """Read the JSON of a response."""
    shown = msgspec.json.decode(body, type=dict[str, Any])
    conversation = shown.get("conversation") or {}
    return Finished(shown["id"], shown.get("store", True), conversation.get("id", ""), shown.get("output", []))


class ResponseKeeper:
    """One per orchestrator."""

    def __init__(
        self,
        responses: ResponseStore,
        conversations: ConversationStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._responses = responses
        self._conversations = conversations
        self._clock = clock

    async def put(self, tenant: str, body: bytes, kept: KeptResponse, digest: bytes = b"") -> Finished:
        """Store a complete response, as far as it is to be stored; what is used of it. Raises `StarlingError`."""
        response = read_finished(body)
        nbytes = 0
        if response.is_stored:
            nbytes = len(body) + len(kept.conversation) + len(kept.inputs)
            self._responses.check_fits(nbytes + FRAME_BYTES)
        digest = digest or kept.digest
        if response.conversation:
            items = [*stored_items(kept.inputs), *answer_items(response.output)]
            of = tenant, response.conversation, response.id
            add = partial(self._conversations.add_response, *of, items, nbytes, digest)
            try:
                is_added = await add()
            except TooLargeError as error:
                raise error.of_response() from None
        if response.is_stored:
            put = partial(self._responses.put, tenant, response.id, body, kept.conversation, kept.inputs, digest)
            if not response.conversation:
                await put()
                return response
            is_new = await self._put_or_take_out(put, add if is_added else None, tenant, response)
            if not is_added:  # those who had added them may have taken them out meanwhile
                await add()
            if not is_new:
                await self.withdraw_if_ended(tenant, response.id, response.conversation)
        return response

    async def _put_or_take_out(self, put: _Store, add: _Store | None, tenant: str, response: Finished) -> bool:
        """Store a response whose items are in its conversation; if it surely is not stored, take them out again.

        `add`: adds them; None: they were there before.
        """
        is_sure, end = True, self._clock() + PUT_AGAIN_S
        for pause_s in (*PUT_PAUSES_S, None):
            try:
                return await put()
            except StarlingError as error:
                is_sure = is_sure and not isinstance(error, MaybeStored)
                if isinstance(error, StorageUnavailable) and pause_s is not None and self._clock() < end:
                    await asyncio.sleep(pause_s)
                    continue
                if is_sure and add is not None:
                    with suppress(StarlingError):  # the next attempt of the request finds them, and adds none
                        await self._conversations.take_out_response(tenant, response.conversation, response.id)
                        if await self._responses.has(tenant, response.id):  # another orchestrator has stored it
                            await add()
                raise
        raise AssertionError

    async def withdraw_if_ended(self, tenant: str, name: str, conversation: str) -> None:
        """Withdraw the items of a response if it is stored as one that has none. Raises `StarlingError`."""
        if not conversation:
            return
        stored = await self._responses.get(tenant, name)
        if stored is not None and stored.status in ENDED_WITHOUT_ITEMS:
            await self._conversations.withdraw_response(tenant, conversation, name, stored.digest)
