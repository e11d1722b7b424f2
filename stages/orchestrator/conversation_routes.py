"""Handlers of /v1/conversations: what a server answers, for conversations that all orchestrators share."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from pipeline.api.conversation_object import TooLargeError, deleted_body, missing_item
from pipeline.api.item_pages import list_body, read_page
from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.api.requests.conversations import ConversationItem, NewConversation
from stages.orchestrator.event_response import send_stored, send_whole
from stages.orchestrator.http_app import CALLER, FRONT, PRINCIPAL, body_of, headers_of
from stages.orchestrator.slots import to_its_end

T = TypeVar("T")
PATH = "/v1/conversations"


def add_routes(app: web.Application) -> None:
    """Add the routes to the orchestrator's application."""
    app.router.add_post(PATH, _create)
    app.router.add_get(f"{PATH}/{{id}}", _get)
    app.router.add_post(f"{PATH}/{{id}}", _update)
    app.router.add_delete(f"{PATH}/{{id}}", _delete)
    app.router.add_get(f"{PATH}/{{id}}/items", _list_items)
    app.router.add_post(f"{PATH}/{{id}}/items", _add_items)
    app.router.add_get(f"{PATH}/{{id}}/items/{{item}}", _get_item)
    app.router.add_delete(f"{PATH}/{{id}}/items/{{item}}", _delete_item)


async def _read(request: web.Request, reader: str) -> NewConversation:
    """Charge the request to the quotas, and read its body. Raises `StarlingError`."""
    front = request.app[FRONT]
    await front.take_request(request[CALLER])
    return await front.read_conversation(reader, await body_of(request), headers_of(request))


async def _change(request: web.Request, work: Callable[[], Awaitable[T]]) -> T:
    """Change a conversation. It counts as a request of its client until it ends, also when the client has left."""
    with request.app[FRONT].counted(request[PRINCIPAL]):
        return await to_its_end(work())


def _named(new: NewConversation) -> list[ConversationItem]:
    return [item.named(secrets.token_hex(12)) for item in new.items]


async def _create(request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations."""
    front, tenant = request.app[FRONT], request[CALLER].tenant
    with front.counted(request[PRINCIPAL]):
        conversations = front.responses.conversations
        new = await _read(request, "conversation")
        try:
            made = await to_its_end(conversations.create(tenant, new.metadata, _named(new)))
        except TooLargeError as error:
            raise error.of_items() from None
    return _json(to_json(made.shown))


async def _get(request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/ID."""
    front, tenant = request.app[FRONT], request[CALLER].tenant
    with front.counted(request[PRINCIPAL]):
        found = await front.responses.conversations.get(tenant, request.match_info["id"])
    return _json(to_json(found.shown))


async def _update(request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations/ID: replace the metadata."""
    front, tenant = request.app[FRONT], request[CALLER].tenant
    with front.counted(request[PRINCIPAL]):
        conversations = front.responses.conversations
        new = await _read(request, "conversation_update")
        made = await to_its_end(conversations.set_metadata(tenant, request.match_info["id"], new.metadata))
    return _json(to_json(made.shown))


async def _delete(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/conversations/ID."""
    front, tenant, name = request.app[FRONT], request[CALLER].tenant, request.match_info["id"]
    await _change(request, lambda: front.responses.conversations.delete(tenant, name))
    return _json(deleted_body(name))


async def _list_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/ID/items."""
    front, tenant = request.app[FRONT], request[CALLER].tenant
    page = read_page(request.query)
    with front.counted(request[PRINCIPAL]):
        found = await front.responses.conversations.get(tenant, request.match_info["id"])
        return await send_stored(request, found.page_body(page))


async def _add_items(request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations/ID/items."""
    front, tenant = request.app[FRONT], request[CALLER].tenant
    with front.counted(request[PRINCIPAL]):
        conversations = front.responses.conversations
        items = _named(await _read(request, "conversation_items"))
        try:
            await to_its_end(conversations.add(tenant, request.match_info["id"], items))
        except TooLargeError as error:
            raise error.of_items() from None
        # It is as large as the body, which counts, and cannot be refused: they are added.
        return await send_whole(request, _json(list_body([(item.id, item.item) for item in items], has_more=False)))


async def _get_item(request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/ID/items/ITEM."""
    front, tenant = request.app[FRONT], request[CALLER].tenant
    name, item_id = request.match_info["id"], request.match_info["item"]
    with front.counted(request[PRINCIPAL]):
        item = (await front.responses.conversations.get(tenant, name)).find(item_id)
        if item is None:
            raise missing_item(name, item_id)
        return await send_stored(request, item.item)


async def _delete_item(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/conversations/ID/items/ITEM: returns the conversation."""
    front, tenant = request.app[FRONT], request[CALLER].tenant
    names = request.match_info["id"], request.match_info["item"]
    left = await _change(request, lambda: front.responses.conversations.delete_item(tenant, *names))
    return _json(to_json(left.shown))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=CONTENT_TYPE)
