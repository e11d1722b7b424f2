"""Responses as conversations: what is stored of them, and how a request continues one.

claim     before everything: one request at a time continues a conversation
join      before admission: the conversation up to `previous_response_id` comes before the input
commit    when all text has been sent: the response is stored; only then does the request end
ended     a request in the background that failed or was cancelled: its response says so
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.api.json_body import to_json
from pipeline.api.requests.generation_request import GenerationRequest, ResponseFields
from pipeline.api.requests.tool_history import check_results
from pipeline.errors import Conflict, InvalidRequest, NotFound, Overloaded, StarlingError
from stages.gateway.endpoints.response_events import (
    ID_PREFIX,
    answer_message,
    conversation_items,
    input_items,
    response_object,
)
from stages.gateway.endpoints.response_items import add_message
from stages.gateway.requests.recovery import Recovery
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.stored_conversations import find, messages
from stages.gateway.requests.stored_responses import StoredResponse, StoredResponses

if TYPE_CHECKING:
    import sqlite3

MAX_IN_BACKGROUND = 16  # requests of a tenant; they count against no bound of requests in flight


class Claim:
    """A request's claim of its conversation, from the first look at it until the relay has the request."""

    def __init__(self, claimed: set[tuple[str, str]], conversation: tuple[str, str] | None) -> None:
        self._claimed = claimed
        self._conversation = conversation

    def release(self) -> None:
        """Idempotent."""
        if self._conversation is not None:
            self._claimed.remove(self._conversation)
            self._conversation = None


class Responses:
    """One per gateway, beside its relay."""

    def __init__(self, relay: Relay, store: StoredResponses) -> None:
        self.store = store
        self.waiting: Callable[[], Iterable[RequestState]] = lambda: ()  # after a restart: the relay will have them
        self._relay = relay
        self._claimed: set[tuple[str, str]] = set()  # tenants and conversations of requests that are being admitted

    def claim(self, generation: GenerationRequest, tenant: str) -> Claim:
        """Claim the request's conversation, if it has one. Raises `Conflict` if another request continues it."""
        name = generation.response.conversation_id if generation.response else ""
        if not name:
            return Claim(self._claimed, None)
        requests = (*self._relay.requests.values(), *self.waiting())
        is_running = any(r.spec.tenant == tenant and _conversation_of(r) == name for r in requests)
        if is_running or (tenant, name) in self._claimed:
            raise Conflict(
                f"conversation {name[:80]!r} has a response in progress; wait for its end, or cancel it", "conversation"
            )
        self._claimed.add((tenant, name))
        return Claim(self._claimed, (tenant, name))

    async def join(self, generation: GenerationRequest, tenant: str) -> GenerationRequest:
        """Return the request with the whole conversation. Raises `InvalidRequest`, `NotFound`, `Overloaded`."""
        fields = generation.response
        if not fields:
            return generation
        if fields.in_background:
            self._check_background(tenant)
        if fields.conversation_id:
            previous: list[dict[str, Any]] | None = await self._messages(tenant, fields.conversation_id)
        else:
            previous = await self.store.conversation(tenant, fields.previous) if fields.previous else []
        if previous is None:
            raise NotFound(
                f"there is no response {fields.previous[:80]!r}; it was not stored, or was deleted, or has expired",
                "previous_response_id",
            )
        given = fields.conversation
        conversation = [*previous, *given]
        before = "conversation" if fields.conversation_id else "previous_response_id"
        places = [before] * len(previous) + [f"input[{index}]" for index in range(len(given))]
        check_results(conversation, places, "call_id")
        instructions = (generation.messages or [])[: fields.n_instructions]
        return msgspec.structs.replace(
            generation,
            messages=[*instructions, *conversation],
            response=msgspec.structs.replace(fields, conversation=conversation),
        )

    async def _messages(self, tenant: str, name: str) -> list[dict[str, Any]]:
        """The messages of a conversation. Raises `NotFound`."""

        def read(db: sqlite3.Connection, now: float) -> list[dict[str, Any]] | None:
            return messages(db, tenant, name) if find(db, tenant, name, now) is not None else None

        found = await self.store.transact(read)
        if found is None:
            raise NotFound(f"there is no conversation {name[:80]!r}; it was deleted, or has expired", "conversation")
        joined: list[dict[str, Any]] = []
        for message in found:
            add_message(joined, message)
        return joined

    def _check_background(self, tenant: str) -> None:
        running = [r.spec for r in self._relay.requests.values() if r.spec.generation.is_in_background]
        if sum(spec.tenant == tenant for spec in running) >= MAX_IN_BACKGROUND:
            raise Overloaded(
                f"{MAX_IN_BACKGROUND} requests in the background have not ended, the most of a tenant; wait for one",
                "background",
                retry_after_s=1.0,
            )

    def commit(self, request: RequestState) -> bool:
        """All text of a request is sent. True: its response is being stored, which ends the request."""
        fields = request.spec.generation.response
        if not fields or not (fields.is_stored or fields.conversation_id) or request.is_charged:
            return False  # a request that is generated again was stored the first time

        def on_stored(error: StarlingError | None) -> None:
            if error is not None:
                self._relay.fail(request, error)
            else:
                self._relay.complete(request)

        conversation = [*fields.conversation, answer_message(request)]
        self.store.put(self._stored(request, conversation), on_stored)
        return True

    def ended(self, request: RequestState) -> None:
        """A request has its outcome."""
        fields = request.spec.generation.response
        is_finished = request.outcome is Outcome.FINISHED
        if fields and fields.in_background and not is_finished and not request.is_charged:
            self.store.put(self._stored(request, fields.conversation), lambda error: None)

    @staticmethod
    def _stored(request: RequestState, conversation: list[dict[str, object]]) -> StoredResponse:
        fields = request.spec.generation.response or ResponseFields()
        return StoredResponse(
            request.spec.tenant,
            f"{ID_PREFIX}{request.spec.hex}",
            to_json(response_object(request)),
            conversation,
            to_json([msgspec.Raw(item.item) for item in input_items(request)]),
            is_stored=fields.is_stored,
            added_to=fields.conversation_id,
            added=tuple(conversation_items(request)) if request.outcome is Outcome.OPEN else (),
        )


def _conversation_of(request: RequestState) -> str:
    fields = request.spec.generation.response
    return fields.conversation_id if fields else ""


def request_id_of(response_id: str) -> str:
    """The id of the request that made a response."""
    return "req-" + response_id.removeprefix(ID_PREFIX)


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
