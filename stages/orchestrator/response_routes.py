"""Handlers of /v1/responses/ID: read, stream again, delete, cancel, and the items of the input. See http_app.py."""

from __future__ import annotations

from contextlib import suppress

from aiohttp import web
from aiohttp.hdrs import METH_HEAD

from pipeline.api import sse
from pipeline.api.item_pages import page_body, read_page
from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.api.keys import Caller
from pipeline.api.query import read_streaming
from pipeline.errors import InvalidRequest, NotFound
from stages.orchestrator.event_response import send_stored
from stages.orchestrator.front import Front
from stages.orchestrator.http_app import CALLER, FRONT, PRINCIPAL, answer
from stages.orchestrator.responses.service import PATH


def add_routes(app: web.Application) -> None:
    """Add the routes to the orchestrator's application."""
    app.router.add_get(f"{PATH}/{{id}}", _get)
    app.router.add_delete(f"{PATH}/{{id}}", _delete)
    app.router.add_post(f"{PATH}/{{id}}/cancel", _cancel)
    app.router.add_get(f"{PATH}/{{id}}/input_items", _input_items)


async def _get(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/ID: a response as it is now; with `stream=true` its events after `starting_after`.

    `Last-Event-ID`, which a client that reconnects adds to the same URL, is used instead if there is one.
    """
    front, caller, name = request.app[FRONT], request[CALLER], request.match_info["id"]
    after = read_streaming(request.query)
    with front.counted(request[PRINCIPAL]):
        request_id = front.responses.request_of(caller.tenant, name)
        if after is not None:
            last_id = request.headers.get("Last-Event-ID", "")
            ticket = await front.ticket_of(caller, request_id, last_id)
            if not ticket.forward.is_stream:
                raise InvalidRequest("the response was not made with stream: true; leave stream out", "stream")
            if request.method == METH_HEAD:
                return web.Response(headers=sse.HEADERS)
            return await answer(request, front, ticket, -1 if last_id else after)
        return await send_stored(request, await _current(front, caller, name))


async def _current(front: Front, caller: Caller, name: str) -> bytes:
    """A response as it is now. Raises `NotFound`, `StorageUnavailable`."""
    with suppress(NotFound):
        return (await front.responses.find(caller.tenant, name)).body
    job = await front.responses.job(caller.tenant, name)
    running = await front.running_response(caller, name)
    if running is None and job is not None:
        running = job.shown
    # It may have ended since the first look.
    return running if running is not None else (await front.responses.find(caller.tenant, name)).body


async def _delete(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/responses/ID."""
    front, caller, name = request.app[FRONT], request[CALLER], request.match_info["id"]
    with front.counted(request[PRINCIPAL]):
        front.responses.request_of(caller.tenant, name)
        is_running = await front.responses.job(caller.tenant, name) is not None
        try:
            await front.responses.find(caller.tenant, name)
        except NotFound:
            is_running = is_running or await front.running_response(caller, name) is not None
            front.responses.check_delete(name, is_running=is_running)
        await front.delete_response(caller, name)
    return _json(to_json({"id": name, "object": "response", "deleted": True}))


async def _cancel(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/ID/cancel: end a response in the background. One that has ended is returned as it is."""
    front, caller, name = request.app[FRONT], request[CALLER], request.match_info["id"]
    with front.counted(request[PRINCIPAL]):
        request_id = front.responses.request_of(caller.tenant, name)
        job = await front.responses.job(caller.tenant, name)
        if job is not None and front.responses.background is not None:

            async def stop() -> None:
                with suppress(NotFound):
                    await front.cancel(caller, request_id)

            await front.responses.background.cancel(job, await front.running_response(caller, name), stop)
        try:
            return await send_stored(request, (await front.responses.find(caller.tenant, name)).body)
        except NotFound:
            if await front.running_response(caller, name) is None:
                raise
        raise InvalidRequest(
            "only a response with background: true can be cancelled; close its connection instead", "background"
        )


async def _input_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/ID/input_items: the items of the input of a response that is stored, or in the background."""
    front, caller, name = request.app[FRONT], request[CALLER], request.match_info["id"]
    page = read_page(request.query)
    with front.counted(request[PRINCIPAL]):
        await front.take_request(caller)
        return await send_stored(request, page_body(await _inputs(front, caller, name), page))


async def _inputs(front: Front, caller: Caller, name: str) -> bytes:
    """The items of a response's input, as JSON. Raises `NotFound`, `StorageUnavailable`."""
    with suppress(NotFound):
        return (await front.responses.find(caller.tenant, name)).inputs
    job = await front.responses.job(caller.tenant, name)  # it runs in the background, or has ended since the first look
    return job.inputs if job is not None else (await front.responses.find(caller.tenant, name)).inputs


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=CONTENT_TYPE)
