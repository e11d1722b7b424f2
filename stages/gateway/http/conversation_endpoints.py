"""Handlers of /v1/conversations, and of the items of a response's input."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
from aiohttp import web

from pipeline.api.json_body import to_json
from pipeline.errors import InvalidRequest, NotFound
from stages.gateway.endpoints.conversations import ID_PREFIX, NewConversation
from stages.gateway.http.context import CALLER, PRINCIPAL, SERVICE
from stages.gateway.http.request_body import read_body
from stages.gateway.http.whole_response import send_body
from stages.gateway.requests import stored_conversations as stored
from stages.gateway.requests.stored_conversations import Conversation, ConversationItem, TooLargeError

if TYPE_CHECKING:
    import sqlite3

MAX_LIMIT = 100
DEFAULT_LIMIT = 20  # both as in OpenAI's API
T = TypeVar("T")


def _missing(name: str) -> NoReturn:
    raise NotFound(f"there is no conversation {name[:80]!r}; it was deleted, or has expired")


def _missing_item(name: str, item_id: str) -> NoReturn:
    raise NotFound(f"conversation {name[:80]!r} has no item {item_id[:80]!r}")


def _named(new: NewConversation) -> list[ConversationItem]:
    return [item.named(secrets.token_hex(12)) for item in new.items]


async def _transact(
    request: web.Request, job: Callable[[sqlite3.Connection, float, str, str], T], *, writes: bool = False
) -> T:
    """Run a job with the connection, the time, the tenant and the id of the path. Raises `NotFound`."""
    store, tenant = request.app[SERVICE].responses.store, request[CALLER].tenant
    name = request.match_info.get("id", "")

    def run(db: sqlite3.Connection, now: float) -> T:
        if name and stored.find(db, tenant, name, now) is None:
            _missing(name)
        return job(db, now, tenant, name)

    try:
        return await store.transact(run, tenant if writes else "")
    except TooLargeError as error:
        raise InvalidRequest(f"the items do not fit into the conversation: {error}", "items") from None


def _add(request: web.Request, items: list[ConversationItem]) -> Callable[[sqlite3.Connection, float, str, str], None]:
    store = request.app[SERVICE].responses.store

    def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> None:
        stored.add(db, tenant, name, items, now, store.ttl_s, store.tenant_bytes)

    return job


async def create(request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations."""
    service = request.app[SERVICE]
    with service.in_flight.counted(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        new: NewConversation = await read_body(request, service.config, "conversation")
        items, store = _named(new), service.responses.store
        name = f"{ID_PREFIX}{secrets.token_hex(24)}"

        def job(db: sqlite3.Connection, now: float, tenant: str, _: str) -> Conversation:
            made = Conversation(name, int(now), new.metadata)
            stored.create(db, tenant, made, now, store.ttl_s)
            stored.add(db, tenant, name, items, now, store.ttl_s, store.tenant_bytes)
            return made

        made = await _transact(request, job, writes=True)
        return await send_body(request, to_json(made.shown))


async def get(request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/ID."""
    with request.app[SERVICE].in_flight.counted(request[PRINCIPAL]):
        return await send_body(request, to_json((await _transact(request, _found)).shown))


def _found(db: sqlite3.Connection, now: float, tenant: str, name: str) -> Conversation:
    return stored.find(db, tenant, name, now) or _missing(name)


async def update(request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations/ID: replace the metadata."""
    service = request.app[SERVICE]
    with service.in_flight.counted(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        new: NewConversation = await read_body(request, service.config, "conversation_update")

        def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> Conversation:
            stored.set_metadata(db, tenant, name, new.metadata)
            return _found(db, now, tenant, name)

        return await send_body(request, to_json((await _transact(request, job, writes=True)).shown))


async def delete(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/conversations/ID."""

    def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> None:
        stored.delete(db, tenant, name, now)

    with request.app[SERVICE].in_flight.counted(request[PRINCIPAL]):
        await _transact(request, job)
    answer = {"id": request.match_info["id"], "object": "conversation.deleted", "deleted": True}
    return await send_body(request, to_json(answer))


async def list_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/ID/items."""
    after, limit, is_ascending = _page_of(request)

    def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> tuple[list[tuple[str, bytes]], bool] | None:
        return stored.page(db, tenant, name, after, limit, is_ascending=is_ascending)

    with request.app[SERVICE].in_flight.counted(request[PRINCIPAL]):
        found = await _transact(request, job)
        if found is None:
            raise _unknown_after(after)
        items, has_more = found
        return await send_body(request, _list(items, has_more=has_more))


async def add_items(request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations/ID/items."""
    service = request.app[SERVICE]
    with service.in_flight.counted(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        items = _named(await read_body(request, service.config, "conversation_items"))
        await _transact(request, _add(request, items), writes=True)
        return await send_body(request, _list([(item.id, item.item) for item in items], has_more=False))


async def get_item(request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/ID/items/ITEM."""
    item_id = request.match_info["item"]

    def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> bytes:
        return stored.item(db, tenant, name, item_id) or _missing_item(name, item_id)

    with request.app[SERVICE].in_flight.counted(request[PRINCIPAL]):
        return await send_body(request, await _transact(request, job))


async def delete_item(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/conversations/ID/items/ITEM: returns the conversation."""
    item_id = request.match_info["item"]

    def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> Conversation:
        if not stored.delete_item(db, tenant, name, item_id):
            _missing_item(name, item_id)
        return _found(db, now, tenant, name)

    with request.app[SERVICE].in_flight.counted(request[PRINCIPAL]):
        return await send_body(request, to_json((await _transact(request, job)).shown))


async def list_input_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/ID/input_items: the items of the input of a stored response."""
    service, name = request.app[SERVICE], request.match_info["id"]
    after, limit, is_ascending = _page_of(request)
    with service.in_flight.counted(request[PRINCIPAL]):
        items = await service.responses.store.inputs(request[CALLER].tenant, name)
        if items is None:
            raise NotFound(f"there is no response {name[:80]!r}; it was not stored, or was deleted, or has expired")
        ordered = items if is_ascending else items[::-1]
        first = 0
        if after:
            places = [index for index, item in enumerate(ordered, 1) if item["id"] == after]
            if not places:
                raise _unknown_after(after)
            first = places[0]
        page = ordered[first : first + limit]
        made = [(item["id"], to_json(item)) for item in page]
        return await send_body(request, _list(made, has_more=len(ordered) > first + limit))


def _page_of(request: web.Request) -> tuple[str, int, bool]:
    """The parameters `after`, `limit` and `order`. Raises `InvalidRequest`."""
    query = request.query
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= MAX_LIMIT:
        raise InvalidRequest(f"limit is {limit[:40]!r}; it must be a whole number from 1 to {MAX_LIMIT}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:40]!r}; it must be asc or desc", "order")
    return query.get("after", ""), int(limit), order == "asc"


def _unknown_after(after: str) -> InvalidRequest:
    return InvalidRequest(f"after is {after[:80]!r}, which is the id of no item here; give one of the list", "after")


def _list(items: list[tuple[str, bytes]], *, has_more: bool) -> bytes:
    ids = [item_id for item_id, _ in items]
    answer: dict[str, Any] = {
        "object": "list",
        "data": [msgspec.Raw(item) for _, item in items],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }
    return to_json(answer)
