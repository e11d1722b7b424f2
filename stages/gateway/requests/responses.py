"""Responses as conversations: what is stored of them, and how a request continues one.

claim     before everything: one request at a time continues a conversation; so many may be in the background
join      before admission: the conversation up to `previous_response_id` comes before the input
commit    when all text has been sent: the response is stored; only then does the request end
ended     a request in the background that failed or was cancelled: its response says so
refused   likewise for one that failed before admission, when its stream had begun
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.api.conversation_object import joined, missing
from pipeline.api.json_body import to_json
from pipeline.api.requests.conversations import ConversationItem
from pipeline.api.requests.generation_request import GenerationRequest, ResponseFields
from pipeline.api.response_object import (
    answer_items,
    answer_message,
    input_items,
    request_id_of,
    response_id_of,
    shown_inputs,
    with_conversation,
)
from pipeline.errors import Conflict, InvalidRequest, NotFound, Overloaded, StarlingError
from stages.gateway.endpoints.response_events import response_object
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.stored_conversations import find, messages
from stages.gateway.requests.stored_responses import StoredResponse, StoredResponses

if TYPE_CHECKING:
    import sqlite3

MAX_IN_BACKGROUND = 16  # requests of a tenant; in all `Responses` has a bound. They count against no other one


class Claim:
    """What a request reserves from its arrival until the relay has it: its conversation, a place in the background."""

    def __init__(self, claims: set[Claim], tenant: str, conversation: str, *, is_in_background: bool) -> None:
        self.tenant = tenant
        self.conversation = conversation  # "": none
        self.is_in_background = is_in_background
        self._claims = claims
        claims.add(self)

    def release(self) -> None:
        """Idempotent."""
        self._claims.discard(self)


class Responses:
    """One per gateway, beside its relay."""

    def __init__(self, relay: Relay, store: StoredResponses, max_in_background: int) -> None:
        """`max_in_background`: requests of all tenants."""
        self.store = store
        self.waiting: Callable[[], Iterable[RequestState]] = lambda: ()  # after a restart: the relay will have them
        self._relay = relay
        self._max_in_background = max_in_background
        self._claims: set[Claim] = set()  # of requests that are being admitted
        # Requests whose response is being stored; what is to be called after that for one that has failed meanwhile.
        self._storing: dict[str, Callable[[], None] | None] = {}

    def claim(self, generation: GenerationRequest, tenant: str) -> Claim:
        """Reserve what a request needs until the relay has it.

        Raises `Conflict` if another request continues its conversation, and `Overloaded` if too many are in the
        background.
        """
        fields = generation.response
        name = fields.conversation_id if fields and not fields.is_kept_elsewhere else ""
        if name:
            running = {(r.spec.tenant, _conversation_of(r)) for r in self._requests()}
            if (tenant, name) in running or any((c.tenant, c.conversation) == (tenant, name) for c in self._claims):
                raise Conflict(
                    f"conversation {name[:80]!r} has a response in progress; wait for its end, or cancel it",
                    "conversation",
                )
        if generation.is_in_background:
            self._check_background(tenant)
        return Claim(self._claims, tenant, name, is_in_background=generation.is_in_background)

    def _requests(self) -> Iterable[RequestState]:
        return (*self._relay.requests.values(), *self.waiting())

    async def join(
        self, generation: GenerationRequest, tenant: str, previous: list[dict[str, Any]] | None = None
    ) -> GenerationRequest:
        """Return the request with the whole conversation. Raises `InvalidRequest`, `NotFound` or `StarlingError`.

        `previous`: the messages before it, of a request that is kept elsewhere.
        """
        fields = generation.response
        if not fields:
            return generation
        if fields.is_kept_elsewhere:
            return with_conversation(generation, previous or [])
        if fields.is_stored or fields.conversation_id:
            self.store.check_room(tenant)
        previous = []
        if fields.conversation_id:
            previous = await self._messages(tenant, fields.conversation_id)
        elif fields.previous:
            previous = await self._stored_conversation(tenant, fields.previous)
        conversation = [*previous, *fields.conversation]
        if fields.is_stored:
            self.store.check_fits(len(msgspec.msgpack.encode(conversation)) + len(fields.inputs) + len(fields.repeated))
        before = "conversation" if fields.conversation_id else "previous_response_id"
        return with_conversation(generation, previous, before)

    async def _stored_conversation(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """The messages up to a response. Raises `Conflict` while it is generated, and `NotFound`."""
        request_id = request_id_of(response_id)
        running = [r.spec for r in self._requests() if r.id == request_id]  # first: it may end while the file is read
        found = await self.store.conversation(tenant, response_id)
        if found:
            return found
        if any(s.tenant == tenant and s.generation.response and s.generation.response.is_stored for s in running):
            raise Conflict(f"response {response_id!r} is being generated; wait for its end", "previous_response_id")
        raise NotFound(
            f"there is no response {response_id[:80]!r}; it was not stored, or was deleted, or has expired",
            "previous_response_id",
        )

    async def _messages(self, tenant: str, name: str) -> list[dict[str, Any]]:
        """The messages of a conversation. Raises `NotFound`."""

        def read(db: sqlite3.Connection, now: float) -> list[dict[str, Any]] | None:
            return messages(db, tenant, name) if find(db, tenant, name, now) is not None else None

        found = await self.store.transact(read, caller=tenant)
        if found is None:
            raise missing(name, "conversation")
        return joined(found)

    def _check_background(self, tenant: str) -> None:
        running = Counter(r.spec.tenant for r in self._requests() if r.spec.generation.is_in_background)
        running.update(claim.tenant for claim in self._claims if claim.is_in_background)
        reserve = self._max_in_background // 8 if running[tenant] else 0  # for tenants that have none
        if running.total() >= self._max_in_background - reserve:
            raise Overloaded(
                f"{self._max_in_background} requests in the background have not ended, the most of all tenants "
                f"(server.max_concurrent_requests); try again later",
                "background",
                retry_after_s=1.0,
            )
        if running[tenant] >= MAX_IN_BACKGROUND:
            raise Overloaded(
                f"{MAX_IN_BACKGROUND} requests in the background have not ended, the most of a tenant; wait for one",
                "background",
                retry_after_s=1.0,
            )

    def commit(self, request: RequestState) -> bool:
        """All text of a request is sent. True: its response is being stored, which ends the request."""
        fields = request.spec.generation.response
        if not fields or not (fields.is_stored or fields.conversation_id) or fields.is_kept_elsewhere:
            return False
        if request.is_charged:
            return False  # a request that is generated again was stored the first time

        def on_stored(error: StarlingError | None) -> None:
            then = self._storing.pop(request.id)
            if then is not None and error is not None:
                self.ended(request, then)
            elif then is not None:
                then()
            elif error is not None:
                self._relay.fail(request, error)
            else:
                self._relay.complete(request)

        self._storing[request.id] = None
        response = response_object(request)
        conversation = [*fields.conversation, answer_message(response["output"])]
        self.store.put(self._stored(request, response, conversation), on_stored)
        return True

    def ended(self, request: RequestState, then: Callable[[], None]) -> None:
        """A request has its outcome. Calls `then` when its response says so, or cannot."""
        fields = request.spec.generation.response
        is_finished = request.outcome is Outcome.FINISHED
        if not fields or not request.spec.generation.is_in_background or is_finished or request.is_charged:
            then()
            return
        if request.id in self._storing:  # as complete, and its items go into its conversation: that it stays
            self._storing[request.id] = then
            return
        failed = self._stored(request, response_object(request), fields.conversation)

        def on_stored(error: StarlingError | None) -> None:
            if error is not None and error.code == "INSUFFICIENT_RESOURCES":  # it can be read, and not be continued
                self.store.put(failed._replace(conversation=[], inputs=()), lambda error: then())
            else:
                then()

        self.store.put(failed, on_stored)

    async def refused(
        self, generation: GenerationRequest, tenant: str, request_id: str, response: dict[str, Any]
    ) -> None:
        """Store the failed response of a request in the background that was not admitted, and is named by its stream.

        It can be read, and not be continued.  Where it cannot be stored, the stream alone says how it ended.
        """
        fields = generation.response
        if not fields or not generation.is_in_background:
            return
        try:
            self.store.check_room(tenant)
        except StarlingError:
            return
        inputs = shown_inputs(fields, request_id)
        is_over = asyncio.Event()
        failed = StoredResponse(tenant, response_id_of(request_id), to_json(response), [], inputs)
        self.store.put(failed, lambda error: is_over.set())
        await is_over.wait()

    @staticmethod
    def _stored(request: RequestState, response: dict[str, Any], conversation: list[dict[str, Any]]) -> StoredResponse:
        fields = request.spec.generation.response or ResponseFields()
        is_added = fields.conversation_id and request.outcome is Outcome.OPEN

        def added() -> list[ConversationItem]:
            return [*input_items(fields, request.id), *answer_items(response["output"])]

        return StoredResponse(
            request.spec.tenant,
            response_id_of(request.id),
            to_json(response),
            conversation,
            shown_inputs(fields, request.id),
            is_stored=fields.is_stored,
            added_to=fields.conversation_id,
            added=added if is_added else tuple,
        )


def _conversation_of(request: RequestState) -> str:
    fields = request.spec.generation.response
    return fields.conversation_id if fields and not fields.is_kept_elsewhere else ""


def find_open(recovery: Recovery, response_id: str, tenant: str) -> RequestState | None:
    """The request of a response that is being generated, or waits for that after a restart of this process."""
    request = recovery.find_open(request_id_of(response_id))
    if request is None or request.spec.tenant != tenant or not request.spec.generation.response:
        return None
    return request


def check_cancel(request: RequestState) -> None:
    """Raises `InvalidRequest` for a request that has a client."""
    if not request.spec.generation.is_in_background:
        raise InvalidRequest("only a response with background: true can be cancelled; close its connection instead")
