"""Handlers of /v1/conversations."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from pipeline.api.conversation_object import Conversation, TooLargeError, deleted_body, missing, missing_item
from pipeline.api.item_pages import list_body, read_page, unknown_after
from pipeline.api.json_body import to_json
from pipeline.api.requests.conversations import ID_PREFIX, ConversationItem, NewConversation
from stages.gateway.http.context import CALLER, PRINCIPAL, SERVICE
from stages.gateway.http.request_body import read_body
from stages.gateway.http.whole_response import send_body
from stages.gateway.requests import stored_conversations as stored

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")


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
            raise missing(name)
        return job(db, now, tenant, name)

    try:
        return await store.transact(run, tenant if writes else "", tenant)
    except TooLargeError as error:
        raise error.of_items() from None


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
    found = stored.find(db, tenant, name, now)
    if found is None:
        raise missing(name)
    return found


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
    return await send_body(request, deleted_body(request.match_info["id"]))


async def list_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/ID/items."""
    after, limit, is_ascending = read_page(request.query)

    def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> tuple[list[tuple[str, bytes]], bool] | None:
        return stored.page(db, tenant, name, after, limit, is_ascending=is_ascending)

    with request.app[SERVICE].in_flight.counted(request[PRINCIPAL]):
        found = await _transact(request, job)
        if found is None:
            raise unknown_after(after)
        items, has_more = found
        return await send_body(request, list_body(items, has_more=has_more))


async def add_items(request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations/ID/items."""
    service = request.app[SERVICE]
    with service.in_flight.counted(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        items = _named(await read_body(request, service.config, "conversation_items"))
        await _transact(request, _add(request, items), writes=True)
        return await send_body(request, list_body([(item.id, item.item) for item in items], has_more=False))


async def get_item(request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/ID/items/ITEM."""
    item_id = request.match_info["item"]

    def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> bytes:
        found = stored.item(db, tenant, name, item_id)
        if found is None:
            raise missing_item(name, item_id)
        return found

    with request.app[SERVICE].in_flight.counted(request[PRINCIPAL]):
        return await send_body(request, await _transact(request, job))


async def delete_item(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/conversations/ID/items/ITEM: returns the conversation."""
    item_id = request.match_info["item"]

    def job(db: sqlite3.Connection, now: float, tenant: str, name: str) -> Conversation:
        if not stored.delete_item(db, tenant, name, item_id):
            raise missing_item(name, item_id)
        return _found(db, now, tenant, name)

    with request.app[SERVICE].in_flight.counted(request[PRINCIPAL]):
        return await send_body(request, to_json((await _transact(request, job)).shown))
