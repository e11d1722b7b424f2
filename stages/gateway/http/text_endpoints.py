"""Handlers of the endpoints that generate text, and of `GET /v1/requests/ID`.

A handler reads the body, admits the request and then waits once, for the end of its sink: the relay writes to the
connection directly.  When a client disconnects, aiohttp cancels the handler, and the handler removes its sink.  The
request ends with its last sink unless it can be resumed (`recovery.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.hdrs import METH_HEAD

from pipeline.api import response_context, session_header, sse, weights_header
from pipeline.api.idempotency_key import HEADER as IDEMPOTENCY_KEY
from pipeline.api.idempotency_key import digest_head, read_key
from pipeline.api.json_body import CONTENT_TYPE
from pipeline.api.output_tokens import OUTPUT, RELAY
from pipeline.api.request_name import HEADER as NAME
from pipeline.api.request_name import RequestName, new_request_name, read_request_name
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import Config
from pipeline.errors import Conflict, Forbidden, InvalidRequest, NotFound, StarlingError, cancelled_by_client
from pipeline.ipc.tcp_transport import reset
from stages.gateway.endpoints import chat_tools
from stages.gateway.endpoints.completion_formatter import CompletionFormatter
from stages.gateway.endpoints.generate_formatter import GenerateFormatter
from stages.gateway.endpoints.message_formatter import MessageFormatter
from stages.gateway.endpoints.output_logprobs import prepare_rest, whole_body
from stages.gateway.endpoints.response_events import ResponsesFormatter, kept_record
from stages.gateway.http.block_stream import BlockStream
from stages.gateway.http.connection import PROBE, Connection
from stages.gateway.http.context import (
    BACKLOGS,
    CALLER,
    CLAIM,
    CLIENT_ID,
    CONTINUED,
    CONVERSATION,
    KEPT,
    MAY_ADD,
    PAGES,
    PRINCIPAL,
    SERVICE,
    STARTED_AT,
    STATE,
    TRACE,
    Handler,
    json_response,
)
from stages.gateway.http.loading_stream import LoadingStream, begin_stream, queued_stream, silent_s
from stages.gateway.http.request_body import read_body
from stages.gateway.http.sinks import EventStream, StreamSink, WholeResponse
from stages.gateway.http.whole_response import send_body
from stages.gateway.requests.event_cursor import EventCursor, parse_event_cursor
from stages.gateway.requests.readers import CLAIM_S, FanOutSink
from stages.gateway.requests.resume import Check
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.service import Service

log = logging.getLogger("starling.gateway.http")

LAST_BYTES_TIMEOUT_S = 30.0  # for a client to accept the end of its stream


AnySink = StreamSink | WholeResponse | FanOutSink


class TextEndpoint(NamedTuple):
    """An endpoint that generates text, and how to format its response."""

    name: str  # GenerationRequest.endpoint, and the key of its body's reader
    path: str
    formatter: Callable[[RequestState, TokenBytes], Any]
    stream: Callable[[RequestState, Any, Callable[[str], None]], StreamSink] = EventStream  # gets the formatter


TEXT_ENDPOINTS = (
    TextEndpoint("generate", "/v1/generate", GenerateFormatter),
    TextEndpoint("chat", "/v1/chat/completions", chat_tools.make_formatter),
    TextEndpoint("completions", "/v1/completions", CompletionFormatter),
    TextEndpoint("messages", "/v1/messages", MessageFormatter, BlockStream),
    TextEndpoint("responses", "/v1/responses", ResponsesFormatter, BlockStream),
)


def text_handler(endpoint: TextEndpoint, config: Config, service: Service) -> Handler:
    """Return the handler of `endpoint`; with a `Last-Event-ID` it resumes a request instead of starting one."""

    def check_endpoint(spec: RequestSpec) -> None:
        if spec.generation.endpoint != endpoint.name:
            raise InvalidRequest(
                f"Last-Event-ID names a request of another endpoint; use GET /v1/requests/{spec.id}", "Last-Event-ID"
            )

    async def handle(request: web.Request) -> web.StreamResponse:
        _check_trusted(request, service)
        if cursor := _last_event_id(request):
            return await resume(request, service, cursor.request, cursor, check_endpoint)
        if key := read_key(request.headers.get(IDEMPOTENCY_KEY)):
            return await _handle_keyed(request, config, service, endpoint, key)
        with service.admission.slot(request[PRINCIPAL]):
            service.admission.charge_attempt(request[CALLER])
            generation = _marked(request, await read_body(request, config, endpoint.name))
            with _named(request, service) as name:
                return await _admit_and_serve(request, service, generation, name)

    return handle


async def _handle_keyed(
    request: web.Request, config: Config, service: Service, endpoint: TextEndpoint, key: str
) -> web.StreamResponse:
    """Handle a request with an `Idempotency-Key`: attach to the request of an earlier attempt, if there is one.

    While the server takes no new requests, it still answers those that it has.
    """
    keys, caller = service.recovery.keys, request[CALLER]
    is_known = keys.holds(caller.tenant, key)
    slot = service.in_flight.counted if is_known and service.readiness.refusal() else service.admission.slot
    with slot(request[PRINCIPAL]):
        service.admission.charge_attempt(caller)
        coding = ", ".join(request.headers.getall("Content-Encoding", []))
        digest = hashlib.sha256(digest_head(endpoint.name, coding))
        generation = _marked(request, await read_body(request, config, endpoint.name, on_part=digest.update))
        claim, is_new = await keys.claim(caller.tenant, key, digest.digest())
        if is_new:
            try:
                if refusal := service.readiness.refusal():
                    raise refusal
                with _named(request, service) as name:
                    return await _admit_and_serve(
                        request, service, generation, name, lambda state: state.set_key(key, claim.digest)
                    )
            finally:
                keys.release(claim)
    return await resume(request, service, claim.request_id, None)


@contextmanager
def _named(request: web.Request, service: Service) -> Iterator[RequestName | None]:
    """The name that the client gives the request, if any; no other request has it meanwhile. Raises `Conflict`."""
    name = read_request_name(request.headers.get(NAME))
    if name is None:
        yield None
        return
    with service.recovery.named(name.id):
        yield name


async def _admit(
    request: web.Request, service: Service, generation: GenerationRequest, name: RequestName | None
) -> RequestState:
    plugins = service.plugins
    generation = session_header.narrowed(generation, request.headers.get(session_header.HEADER))
    weights = weights_header.read(request.headers.get(weights_header.HEADER))
    if plugins is not None:
        name = name or new_request_name()
        generation = await plugins.before(generation, name.id, request[CALLER].tenant, request[STARTED_AT])
    generation = await service.responses.join(generation, request[CALLER].tenant, request.get(CONVERSATION))
    output = request.get(CONTINUED)
    if output is not None and (name is None or generation.session_id is not None):
        raise InvalidRequest(f"{OUTPUT} needs {NAME} and a request without a session", OUTPUT)
    caller, principal, client_id = request[CALLER], request[PRINCIPAL], request[CLIENT_ID]
    started_at, context = request[STARTED_AT], request.get(TRACE)
    state = await service.admission.admit(generation, caller, started_at, client_id, name, context, weights, principal)
    if plugins is not None:
        state.set_plugins(plugins.chain())
    if output is not None:
        service.admission.force_output(state, output)
    return state


async def _admit_and_serve(
    request: web.Request,
    service: Service,
    generation: GenerationRequest,
    name: RequestName | None,
    on_admitted: Callable[[RequestState], None] = lambda state: None,
) -> web.StreamResponse:
    """Admit a request, start it and send its response. No other request continues its conversation meanwhile."""
    request[CLAIM] = claim = service.responses.claim(generation, request[CALLER].tenant)
    try:
        return await _load_and_serve(request, service, generation, name, on_admitted)
    finally:
        claim.release()


async def _load_and_serve(
    request: web.Request,
    service: Service,
    generation: GenerationRequest,
    name: RequestName | None,
    on_admitted: Callable[[RequestState], None],
) -> web.StreamResponse:
    """Admit a request, start it and send its response. A stream begins with comments while its model is loaded."""
    model, adapter = service.catalog.resolve_adapter(generation.model)
    needs_serving = generation.session_id is not None or bool(adapter)
    if not (generation.stream and service.on_demand.must_wait(model, needs_serving)):
        admitted = await _admit(request, service, generation, name)
        on_admitted(admitted)
        return await _serve(request, service, admitted)
    name = name or new_request_name()
    shown = f"{model}:{adapter}" if adapter else model
    opening = LoadingStream(request, name, shown, lambda: service.on_demand.progress(model))

    async def begin(answering: ExitStack) -> tuple[AnySink, Any]:
        # In one task: what was admitted is started, whether the client takes comments meanwhile or leaves.
        state = await _admit(request, service, generation, name)
        on_admitted(state)
        return await _begin(request, service, state, answering)

    try:
        with ExitStack() as answering:
            sink, formatter = await opening.until_done(begin(answering))
            return await _answer(request, sink, formatter, answering, opening)
    except StarlingError as error:
        return await opening.fail(error, generation)


async def _serve(request: web.Request, service: Service, state: RequestState) -> web.StreamResponse:
    """Start an admitted request and send its response."""
    with ExitStack() as answering:
        sink, formatter = await _begin(request, service, state, answering)
        return await _answer(request, sink, formatter, answering)


async def _answer(
    request: web.Request,
    sink: AnySink,
    formatter: Any,
    answering: ExitStack,
    opening: LoadingStream | None = None,
) -> web.StreamResponse:
    """Send the response to a request that was begun. `opening`: of a stream that had to wait for a load."""
    if isinstance(sink, FanOutSink):  # it goes on in the background
        answering.close()
        return await send_body(request, formatter.whole_response())
    return await _deliver(request, sink, formatter, opening)


async def _begin(
    request: web.Request, service: Service, state: RequestState, answering: ExitStack
) -> tuple[AnySink, Any]:
    """Start an admitted request; its sink and formatter. `answering` is closed when its response has ended.

    A `FanOutSink` is that of a request that goes on in the background.
    """
    request[STATE] = state
    state.is_relayed = RELAY in request.headers
    if state.is_relayed and _is_trusted(request, service):
        request[PAGES] = service.page_namer.header(state.spec)
    formatter = _formatter(service, state)
    is_unread = state.spec.generation.is_in_background and not state.spec.generation.stream
    sink: AnySink
    if is_unread:
        sink = FanOutSink()
    else:
        sink = _stream_sink(request, state, formatter) if state.spec.generation.stream else WholeResponse()
    state.sink = sink
    answering.enter_context(service.timelines.responding(state))
    with service.in_flight.using(state.spec.version):
        await _start(request, service, state)
    if not is_unread:
        answering.callback(service.readers.leave, state, sink)  # no effect unless the client has disconnected
    return sink, formatter


async def _start(request: web.Request, service: Service, state: RequestState) -> None:
    await service.lifecycle.start(state)
    request[CLAIM].release()  # the relay has the request now, or has answered it


async def get_request(request: web.Request) -> web.StreamResponse:
    """GET /v1/requests/ID: the response of an earlier request, a stream from `Last-Event-ID` on."""
    service = request.app[SERVICE]
    name = request.match_info["id"]
    cursor = cursor_of(request, name)
    if request.method == METH_HEAD:
        spec = service.resumer.spec_of(name, request[CALLER].tenant, cursor)
        return web.Response(headers=sse.HEADERS if spec.generation.stream else {"Content-Type": CONTENT_TYPE})
    return await resume(request, service, name, cursor)


async def cancel_request(request: web.Request) -> web.Response:
    """DELETE /v1/requests/ID: cancel a request in flight. Its readers get an error.

    With `?unread=true`, it ends when it has no reader: now, or with its last one; with `&after_s=N` only if it has had
    none for N s. `output_tokens`: computed so far, also of a complete answer that no one has read.
    """
    service, name = request.app[SERVICE], request.match_info["id"]
    state = service.relay.requests.get(name)
    unread, answers = request.query.get("unread"), service.recovery.replay_buffer
    found = state
    if state is None:
        # After a restart one may wait for its model. An orchestrator leaves it: it ends if no one reads it in time.
        found = answers.find(name) if unread == "true" else service.recovery.find_open(name)
    if found is None or found.spec.tenant != request[CALLER].tenant:
        raise NotFound(f"there is no request {name[:80]!r} in flight")
    if unread is not None:
        if found is not state and not (found.outcome is Outcome.FINISHED and answers.account(name)):
            raise NotFound(f"there is no request {name[:80]!r} in flight")
        if unread != "true":
            raise InvalidRequest(f"unread is {unread[:40]!r}; send true, or leave it out", "unread")
        cancelled = state is not None and service.readers.release(state, _after_s(request))
        computed = sum(len(sequence.tokens) for sequence in found.sequences)
        has_reader = state is not None and not cancelled
        told = {"id": name, "cancelled": cancelled, "output_tokens": computed, "has_reader": has_reader}
        return json_response(told)
    service.recovery.cancel(found, cancelled_by_client())
    return json_response({"id": name, "cancelled": True})


def _after_s(request: web.Request) -> int:
    """Read `after_s` of `cancel_request`. Raises `InvalidRequest`."""
    given = request.query.get("after_s", "0")
    if not (given.isascii() and given.isdigit() and len(given) <= 3 and int(given) <= CLAIM_S):
        raise InvalidRequest(f"after_s is {given[:40]!r}; send whole seconds from 0 to {CLAIM_S:g}", "after_s")
    return int(given)


def _marked(request: web.Request, generation: GenerationRequest) -> GenerationRequest:
    """The request, which says whether an orchestrator keeps its conversation. Raises `InvalidRequest`."""
    if CONVERSATION not in request:
        return generation
    if not generation.response:
        raise InvalidRequest(f"{response_context.HEADER} is for /v1/responses; leave it out", response_context.HEADER)
    fields = msgspec.structs.replace(generation.response, is_kept_elsewhere=True)
    return msgspec.structs.replace(generation, response=fields)


def _check_trusted(request: web.Request, service: Service) -> None:
    """Let what only an orchestrator sends be read. Raises `Forbidden` if the sender has no administrator's key."""
    for name in (OUTPUT, response_context.HEADER):
        if name in request.headers and not _is_trusted(request, service):
            raise Forbidden(f"{name} needs an API key with the scope admin; leave it out")
    request[MAY_ADD] = True


def _is_trusted(request: web.Request, service: Service) -> bool:
    """Whether the sender may see and send the tokens of answers, as an orchestrator does."""
    return not service.api_keys or request[CALLER].is_admin


def _last_event_id(request: web.Request) -> EventCursor | None:
    given = request.headers.get("Last-Event-ID", "")
    return parse_event_cursor(given) if given else None


def cursor_of(request: web.Request, name: str) -> EventCursor | None:
    """Read `Last-Event-ID`, of an event of the request `name`; None without one. Raises `InvalidRequest`."""
    cursor = _last_event_id(request)
    if cursor is not None and cursor.request != name:
        raise InvalidRequest(f"Last-Event-ID is of request {cursor.request}, not of this one", "Last-Event-ID")
    return cursor


async def resume(
    request: web.Request,
    service: Service,
    name: str,
    cursor: EventCursor | None,
    check: Check = lambda spec: None,
    number: int = -1,
) -> web.StreamResponse:
    """Add a sink to a request, from `cursor` on. A request that was not streamed has one whole response.

    `number`: of a response, without a cursor: the sequence number after which its events are streamed; -1: all.
    """
    with ExitStack() as answering:
        answering.enter_context(service.in_flight.counted(request[PRINCIPAL]))
        state = request[STATE] = service.resumer.find(name, request[CALLER].tenant, cursor, check)
        state.is_relayed |= RELAY in request.headers
        formatter = _formatter(service, state)
        if cursor is None and number >= 0:
            formatter.skip_numbers(number)

        def make_sink(received: list[int]) -> StreamSink | WholeResponse:
            if state.spec.generation.stream:
                stream = _stream_sink(request, state, formatter)
                stream.resume(state, cursor.choices if cursor is not None else (), received)
                return stream
            whole = WholeResponse()
            if state.outcome is Outcome.FINISHED:
                whole.finished()
            elif state.error is not None:
                whole.failed(state.error)
            return whole

        async def prepare() -> None:
            if state.spec.generation.stream:
                await prepare_rest(formatter, state, cursor)

        answering.enter_context(service.timelines.responding(state, is_resumed=True))
        sink = await service.resumer.resume(state, cursor, make_sink, prepare)
        answering.callback(service.readers.leave, state, sink)
        return await _deliver(request, sink, formatter)


def _endpoint(state: RequestState) -> TextEndpoint:
    return next(endpoint for endpoint in TEXT_ENDPOINTS if endpoint.name == state.spec.generation.endpoint)


def _formatter(service: Service, state: RequestState) -> Any:
    """Return the formatter of a request. Raises `Conflict` if the vocabulary that its logprobs need is gone."""
    endpoint = _endpoint(state)
    vocabulary = service.relay.vocabularies.setdefault(state.spec.vocabulary, TokenBytes())
    has_logprobs = bool(state.scores) or any(s.logprobs for s in state.sequences)
    if not vocabulary and state.outcome is Outcome.FINISHED and has_logprobs:
        raise Conflict(f"the logprobs of {state.id} cannot be formatted: its vocabulary is no longer loaded")
    return endpoint.formatter(state, vocabulary)


def _stream_sink(request: web.Request, state: RequestState, formatter: Any) -> StreamSink:
    def drop(reason: str) -> None:
        log.warning("dropping a connection", extra={**state.log_names, "reason": reason})
        if request.transport is not None:
            reset(request.transport)

    sink = _endpoint(state).stream(state, formatter, drop)
    sink.is_relayed = RELAY in request.headers
    if RELAY in request.headers and (not state.spec.plugins or _is_trusted(request, request.app[SERVICE])):
        sink.name_tokens()
    return sink


async def _deliver(
    request: web.Request,
    sink: StreamSink | WholeResponse,
    formatter: Any,
    opening: LoadingStream | None = None,
) -> web.StreamResponse:
    """Send what the sink collects, until its end, and note that its reader has it."""
    sent = await _send(request, sink, formatter, opening)
    # An orchestrator does not close its sending side alone: it has left.
    connection = request.protocol
    has_left = RELAY in request.headers and isinstance(connection, Connection) and connection.is_half_closed
    if request.transport is not None and not has_left:
        request.app[SERVICE].recovery.replay_buffer.account(request[STATE].id)
    return sent


async def _send(
    request: web.Request,
    sink: StreamSink | WholeResponse,
    formatter: Any,
    opening: LoadingStream | None = None,
) -> web.StreamResponse:
    """Send what the sink collects, until its end."""
    if isinstance(sink, WholeResponse):
        await sink.over
        kept = kept_record(request[STATE]) if RELAY in request.headers else b""
        request[KEPT] = len(kept)
        return await send_body(request, await whole_body(formatter, request[STATE]) + kept)
    opening = opening or queued_stream(request)
    try:
        await opening.until(sink.begun)
    except StarlingError as error:
        return await opening.fail(error, request[STATE].spec.generation)
    finally:
        sink.begun.cancel()
    response = opening.take() or await begin_stream(request)
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")
    sink.attach(request.transport, request.version >= HttpVersion11)
    request[PROBE] = sink.probe
    with request.app[BACKLOGS].counted(sink, request[PRINCIPAL]):
        try:
            await sink.until_over(silent_s(request))
            sink.flush()
        finally:
            sink.detach()
        await _write_end(response)
    return response


async def _write_end(response: web.StreamResponse) -> None:
    """Write the end of a stream. Raises a TIMEOUT if the client does not read it in time."""
    try:
        async with asyncio.timeout(LAST_BYTES_TIMEOUT_S):
            with suppress(ConnectionResetError):  # the client has disconnected: it needs no end of the stream
                await response.write_eof()
    except TimeoutError:
        message = f"the client did not read the end of its stream within {LAST_BYTES_TIMEOUT_S:g} s"
        raise StarlingError("TIMEOUT", message) from None
