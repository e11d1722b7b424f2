"""Stores what an engine has completed: the items in the conversation, and then the response.

A response that is stored has its items in its conversation, exactly once: they are added before, and adding them again
has no effect.  A process that dies in between has added the items of a response that the client has not received: the
orchestrator that sends the stream again stores it.  Of one that was cancelled or has failed meanwhile the items are
withdrawn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from pipeline.api.conversation_object import TooLargeError, stored_items
from pipeline.api.response_context import KeptResponse
from pipeline.api.response_object import answer_items
from stages.orchestrator.responses.conversation_store import ConversationStore
from stages.orchestrator.responses.store import ResponseStore

ENDED_WITHOUT_ITEMS = ("cancelled", "failed")
FRAME_BYTES = 512  # of a stored response beside its parts, at most


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

    def __init__(self, responses: ResponseStore, conversations: ConversationStore) -> None:
        self._responses = responses
        self._conversations = conversations

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
            try:
                added = response.conversation, response.id, items, nbytes, digest
                await self._conversations.add_response(tenant, *added)
            except TooLargeError as error:
                raise error.of_response() from None
        if response.is_stored:
            parts = body, kept.conversation, kept.inputs
            is_new = await self._responses.put(tenant, response.id, *parts, digest)
            if not is_new:
                await self.withdraw_if_ended(tenant, response.id, response.conversation)
        return response

    async def withdraw_if_ended(self, tenant: str, name: str, conversation: str) -> None:
        """Withdraw the items of a response if it is stored as one that has none. Raises `StarlingError`."""
        if not conversation:
            return
        stored = await self._responses.get(tenant, name)
        if stored is not None and stored.status in ENDED_WITHOUT_ITEMS:
            await self._conversations.withdraw_response(tenant, conversation, name, stored.digest)
