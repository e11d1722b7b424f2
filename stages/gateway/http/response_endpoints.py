"""Handlers of /v1/responses/ID: read, stream again, delete, cancel, and the items of its input."""

from __future__ import annotations

from aiohttp import web
from aiohttp.hdrs import METH_HEAD

from pipeline.api import sse
from pipeline.api.item_pages import page_of, read_page
from pipeline.api.json_body import to_json
from pipeline.api.query import read_streaming
from pipeline.api.requests.generation_request import ResponseFields
from pipeline.api.response_object import request_id_of, shown_inputs
from pipeline.errors import Conflict, InvalidRequest, NotFound, StarlingError, cancelled_by_client
from stages.gateway.endpoints.response_events import response_object
from stages.gateway.http.context import CALLER, PRINCIPAL, SERVICE, json_response
from stages.gateway.http.text_endpoints import cursor_of, resume
from stages.gateway.http.whole_response import send_body
from stages.gateway.requests.responses import check_cancel, find_open
from stages.gateway.requests.spec import RequestSpec


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"there is no response {response_id[:80]!r}; it was not stored, or was deleted, or has expired")


async def get_response(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/ID: a response as it is now; with `stream=true` its events after `starting_after`.

    `Last-Event-ID`, which a client that reconnects adds to the same URL, is used instead if there is one.
    """
    service, tenant, name = request.app[SERVICE], request[CALLER].tenant, request.match_info["id"]
    after = read_streaming(request.query)
    if after is not None:
        request_id = request_id_of(name)
        cursor = cursor_of(request, request_id)

        def check(spec: RequestSpec) -> None:
            if not spec.generation.response:
                raise _not_found(name)
            if not spec.generation.stream:
                raise InvalidRequest("the response was not made with stream: true; leave stream out", "stream")

        if request.method == METH_HEAD:
            check(service.resumer.spec_of(request_id, tenant, cursor))
            return web.Response(headers=sse.HEADERS)
        return await resume(request, service, request_id, cursor, check, after)
    with service.in_flight.counted(request[PRINCIPAL]):
        if (running := find_open(service.recovery, name, tenant)) is not None:
            return await send_body(request, to_json(response_object(running)))
        body = await service.responses.store.body(tenant, name)
        if body is None:
            raise _not_found(name)
        return await send_body(request, body)


async def delete_response(request: web.Request) -> web.Response:
    """DELETE /v1/responses/ID."""
    service, tenant, name = request.app[SERVICE], request[CALLER].tenant, request.match_info["id"]
    with service.in_flight.counted(request[PRINCIPAL]):
        is_stored = await service.responses.store.has(tenant, name)
        if find_open(service.recovery, name, tenant) is not None:
            raise Conflict(f"response {name!r} is being generated; cancel it first, or wait for its end")
        if not is_stored:
            raise _not_found(name)
        # First: an idempotency key never names a response that is not there, also if this process is killed in between.
        await service.recovery.forget(request_id_of(name), tenant)
        if not await service.responses.store.delete(tenant, name):
            raise _not_found(name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/ID/cancel: end a response in the background. One that has ended is returned as it is."""
    service, tenant, name = request.app[SERVICE], request[CALLER].tenant, request.match_info["id"]
    with service.in_flight.counted(request[PRINCIPAL]):
        state = find_open(service.recovery, name, tenant)
        if state is None:
            body = await service.responses.store.body(tenant, name)
            if body is None:
                raise _not_found(name)
            return await send_body(request, body)
        check_cancel(state)
        if state.id not in service.relay.requests:
            message = "the response waits for its model after a restart; try again"
            raise StarlingError("MODEL_UNAVAILABLE", message, retry_after_s=1.0)
        if not state.n_open:  # its text is complete, and it is being stored: its conversation gets its items
            await service.responses.store.flushed()
            body = await service.responses.store.body(tenant, name)
            if body is None:
                raise _not_found(name)
            return await send_body(request, body)
        service.readers.abandon(state, cancelled_by_client("response"))
        cancelled = to_json(response_object(state))
        await service.responses.store.flushed()  # it is stored, or that has failed and is logged, and then
        await service.recovery.forget(state.id, tenant)  # journaled: a successor does not generate it again
        return await send_body(request, cancelled)


async def list_input_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/ID/input_items: the items of a response's input.

    It counts as a request in the quotas: its work grows with the input, of which it shows a page.
    """
    service, tenant, name = request.app[SERVICE], request[CALLER].tenant, request.match_info["id"]
    page = read_page(request.query)
    with service.in_flight.counted(request[PRINCIPAL]):
        service.admission.charge_attempt(request[CALLER])
        if (running := find_open(service.recovery, name, tenant)) is not None:
            inputs = shown_inputs(running.spec.generation.response or ResponseFields(), running.id)
            return await send_body(request, page_of(inputs, page))
        body = await service.responses.store.inputs(tenant, name, page)
        if body is None:
            raise _not_found(name)
        return await send_body(request, body)
