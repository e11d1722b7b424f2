"""Responses for clients: what precedes a request for one, how it is stored, and what is asked about it afterwards.

The id of a response follows from that of its request, which belongs to a tenant (request_ids.py): of another tenant's
response nothing is found.  Without sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from pipeline.api import response_context
from pipeline.api.idempotency_key import other_body
from pipeline.api.json_body import to_json
from pipeline.api.requests.generation_request import GenerationRequest, ResponseFields
from pipeline.api.response_context import KeptResponse
from pipeline.api.response_object import inputs_json, request_id_of, response_id_of, with_conversation
from pipeline.errors import Conflict, NotFound, ResourceError, StarlingError, StorageUnavailable
from stages.orchestrator.forward import Forward
from stages.orchestrator.prefixes import block_hashes
from stages.orchestrator.request_ids import RequestIds
from stages.orchestrator.responses.background import Background
from stages.orchestrator.responses.conversation_store import ConversationStore
from stages.orchestrator.responses.jobs import Job, queued_response
from stages.orchestrator.responses.keeper import read_finished
from stages.orchestrator.responses.shared import SharedResponses
from stages.orchestrator.responses.store import Stored
from stages.orchestrator.responses.turns import Turn
from stages.orchestrator.slots import to_its_end

PATH = "/v1/responses"
INLINE_MESSAGES = 64  # a longer conversation is read on a thread


class Joined(NamedTuple):
    """A request with the conversation before it."""

    context: bytes  # what follows its body, for the engine
    blocks: tuple[int, ...]
    prompt_bytes: int
    conversation: bytes  # MessagePack, the messages with those of the input; b"" unless it is in the background


class Responses:
    """One per orchestrator."""

    def __init__(self, shared: SharedResponses | None, ids: RequestIds) -> None:
        """`shared` None: the fleet has no place for responses that all orchestrators share."""
        self.background: Background | None = None  # set if there is a place
        self._shared = shared
        self._ids = ids

    @property
    def conversations(self) -> ConversationStore:
        """The fleet's conversations. Raises `StarlingError` if it has no place for them."""
        return self._required("conversation").conversations

    # ---------------------------------------------------------------- before a request

    async def check_key(
        self, generation: GenerationRequest, tenant: str, request_id: str, key: str, digest: bytes
    ) -> Stored | None:
        """The stored response of a request that was sent before. `key`: "" for one that is read after an event.

        Raises `Conflict` if it has another body's digest, or is in progress in the background.
        """
        fields = generation.response or ResponseFields()
        if self._shared is None or fields.in_background:  # which compares them by itself
            return None
        if key and (opened := await self._shared.jobs.opened(request_id, tenant)) and opened.digest:
            raise other_body(key)  # which says that it is in the background
        stored = await self._shared.store.get(tenant, response_id_of(request_id))
        if key and stored is not None and stored.digest and stored.digest != digest:
            raise other_body(key)
        return stored

    @staticmethod
    def before(generation: GenerationRequest, stored: Stored | None) -> list[dict[str, Any]] | None:
        """What a stored response has continued of its conversation; None: it is not known."""
        fields = generation.response or ResponseFields()
        if stored is None or not fields.conversation_id:
            return None
        messages, given = stored.messages, fields.conversation
        count = len(messages) - len(given) - 1  # the last one is the answer
        return messages[:count] if count >= 0 and messages[count:-1] == given else None

    async def take_turn(
        self, generation: GenerationRequest, tenant: str, request_id: str, key: str = "", digest: bytes = b""
    ) -> Turn:
        """Begin the response of a request, if it continues a conversation. `digest`: of its body, if it has a key.

        Raises `Conflict`, `StarlingError`.
        """
        fields = generation.response or ResponseFields()
        if not fields.conversation_id:
            return Turn()
        shared, name = self._required("conversation"), fields.conversation_id
        try:
            return await shared.turns.take(tenant, name, request_id, digest, key)
        except Conflict as error:
            if error.param != "conversation":  # the key has another body
                raise
            with suppress(NotFound):
                if (await shared.conversations.get(tenant, name)).has_had(request_id):
                    return Turn()  # an answered request is repeated: it changes nothing
            raise

    async def join(
        self,
        generation: GenerationRequest,
        tenant: str,
        salt: str,
        request_id: str,
        key: str = "",
        digest: bytes = b"",
        before: list[dict[str, Any]] | None = None,
    ) -> Joined:
        """What a request continues. `salt`: of the tenant's cached pages. Raises `StarlingError`.

        `digest`: of the body of a request with a key, as it is stored; another one gets `Conflict`.  `before`: what
        the request has continued, if it was answered: its conversation may have changed since.
        """
        fields = generation.response or ResponseFields()
        if fields.is_stored:
            self._required("store")
        previous: list[dict[str, Any]] = []
        if before is not None:
            previous = before
        elif fields.conversation_id:
            conversation = await self.conversations.get(tenant, fields.conversation_id, "conversation")
            if key and (known := conversation.digest_of(request_id)) and known != digest:
                raise other_body(key)
            previous = conversation.messages(before=request_id)
        elif fields.previous:
            previous = (await self._previous(tenant, fields.previous)).messages
            if not previous:  # it has failed, and there was no room for its conversation
                raise _missing(fields.previous, "previous_response_id")
        if len(previous) <= INLINE_MESSAGES:
            return self._joined(generation, fields, previous, salt)
        return await asyncio.to_thread(self._joined, generation, fields, previous, salt)

    async def _previous(self, tenant: str, name: str) -> Stored:
        """The response that a request continues.

        Raises `Conflict` while it is generated in the background, `NotFound`, `StorageUnavailable`.
        """
        field = "previous_response_id"
        self.request_of(tenant, name, field)
        with suppress(NotFound):
            return await self.find(tenant, name, field)
        if await self.job(tenant, name) is not None:
            raise Conflict(f"response {name!r} is being generated; wait for its end", field)
        return await self.find(tenant, name, field)  # it may have ended since the first look

    def _joined(
        self, generation: GenerationRequest, fields: ResponseFields, previous: Sequence[dict[str, Any]], salt: str
    ) -> Joined:
        before = "conversation" if fields.conversation_id else "previous_response_id"
        whole = with_conversation(generation, previous, before)
        context = response_context.encode(previous)
        size = len(context) + len(fields.inputs) + len(fields.repeated)
        if size > response_context.MAX_BYTES:
            raise ResourceError(
                f"the conversation has {size} bytes; at most {response_context.MAX_BYTES} are allowed: begin another "
                "one",
                before if previous else "input",
            )
        if fields.is_stored:
            self._required("store").store.check_fits(size)
        tools = generation.template.tools if generation.template else None
        text = (to_json(tools) if tools else b"") + to_json(whole.messages).removesuffix(b"]")
        blocks = block_hashes(text, f"{generation.model}\0{salt}\0{generation.cache_salt}")
        conversation = b""
        if fields.in_background:
            conversation = msgspec.msgpack.encode(whole.response.conversation if whole.response else [])
        return Joined(context, blocks, len(text), conversation)

    @staticmethod
    def job_of(
        forward: Forward,
        joined: Joined,
        generation: GenerationRequest,
        tenant: str,
        key_id: str,
        digest: bytes,
        at: float,
    ) -> Job:
        """A request that is to run in the background. `digest`: of its body; `at`: s since 1970."""
        fields = generation.response or ResponseFields()
        return Job(
            request_id=forward.id,
            tenant=tenant,
            key_id=key_id,
            model=forward.routed.model,
            body=forward.body,
            headers=forward.headers,
            is_stream=forward.is_stream,
            prompt_bytes=joined.prompt_bytes,
            blocks=joined.blocks,
            at=at,
            digest=digest,
            shown=queued_response(generation, forward.headers),
            conversation=joined.conversation,
            inputs=inputs_json(fields, forward.id),
        )

    # ---------------------------------------------------------------- after it

    async def job(self, tenant: str, name: str) -> Job | None:
        """The request in the background of a response that has not ended. Raises `StorageUnavailable`."""
        return await self.background.find(tenant, name) if self.background is not None else None

    async def is_in_background(self, tenant: str, request_id: str) -> bool:
        """Whether a request makes, or has made, a response in the background. Raises `StorageUnavailable`."""
        if self._shared is None:
            return False
        name = response_id_of(request_id)
        if await self.job(tenant, name) is not None:
            return True
        stored = await self._shared.store.get(tenant, name)
        return stored is not None and msgspec.json.decode(stored.body, type=dict[str, Any]).get("background") is True

    async def keep(
        self,
        tenant: str,
        body: bytes,
        kept: KeptResponse,
        *,
        digest: bytes = b"",
        is_again: bool = False,
        turn: Turn | None = None,
    ) -> None:
        """Store a response, and add it to its conversation, also if its client leaves meanwhile; then end its turn.

        `digest`: of the body of a request with a key, if its engine gives none; `is_again`: its stream is read again,
        maybe while it runs in the background, or after it was deleted.  Raises `StarlingError`.
        """
        shared, name = self._required("store"), read_finished(body).id
        self._check(tenant, name)
        digest = kept.digest or digest  # the engine's is that of the first attempt
        if is_again:
            if await shared.store.was_deleted(tenant, name):
                return
            job = await self.job(tenant, name)
            digest = job.digest if job is not None else digest
        turn = turn or Turn()
        turn.keep()
        await to_its_end(self._keep(shared, tenant, body, kept, digest, turn))

    @staticmethod
    async def _keep(
        shared: SharedResponses, tenant: str, body: bytes, kept: KeptResponse, digest: bytes, turn: Turn
    ) -> None:
        try:
            response = await shared.keeper.put(tenant, body, kept, digest)
        finally:
            await turn.kept()
        if not turn.holds:  # maybe it is that of an earlier attempt, whose orchestrator has died
            with suppress(StorageUnavailable):  # it ends by itself
                await shared.turns.end_of(tenant, response.conversation, request_id_of(response.id))

    async def find(self, tenant: str, name: str, field: str = "") -> Stored:
        """A stored response. `field`: of the request that names it. Raises `NotFound`, `StorageUnavailable`."""
        self.request_of(tenant, name, field)
        stored = await self._required("store").store.get(tenant, name)
        if stored is None:
            raise _missing(name, field)
        return stored

    async def delete(self, tenant: str, name: str) -> None:
        """Remove a stored response. Raises `NotFound`, `StorageUnavailable`."""
        shared, found = self._required("store"), read_finished((await self.find(tenant, name)).body)
        if self.background is not None:
            await self.background.forget(tenant, name)
        if not await shared.store.delete(tenant, name):
            raise _missing(name)
        if found.conversation:
            await shared.conversations.forget_response(tenant, found.conversation, name)

    def request_of(self, tenant: str, name: str, field: str = "") -> str:
        """The id of the request that makes or has made a response. Raises `NotFound`."""
        try:
            return self._check(tenant, name)
        except NotFound:
            raise _missing(name, field) from None

    def check_delete(self, name: str, *, is_running: bool) -> None:
        """Raises `Conflict` for a response that is being generated."""
        if is_running:
            raise Conflict(f"response {name[:80]!r} is being generated; cancel its request first, or wait for its end")

    def _check(self, tenant: str, name: str) -> str:
        return self._ids.check(request_id_of(name), tenant)

    def _required(self, field: str) -> SharedResponses:
        if self._shared is None:
            instead = "leave it out" if field == "conversation" else 'send "store": false'
            raise StarlingError(
                "NOT_IMPLEMENTED",
                f"this orchestrator does not support {field}: set fleet.orchestrator.responses to a directory or "
                f"bucket that all orchestrators share, or {instead}",
                field,
            )
        return self._shared


def _missing(name: str, field: str = "") -> NotFound:
    return NotFound(f"there is no response {name[:80]!r}; it was not stored, or was deleted, or has expired", field)
