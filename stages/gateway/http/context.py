"""What handlers and middleware share: the keys of an HTTP request's attributes, its id, and JSON responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from pipeline.api.body_names import BodyNames
from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.api.keys import Caller
from pipeline.api.output_tokens import Output
from pipeline.api.request_name import new_request_name
from pipeline.observe.scrapes import Scrapes
from stages.gateway.http.connection_gate import ConnectionGate
from stages.gateway.http.parser_pool import ParserPool
from stages.gateway.http.stream_backlogs import StreamBacklogs
from stages.gateway.requests.responses import Claim
from stages.gateway.requests.state import RequestState
from stages.gateway.service import Service
from stages.gateway.tokenizer_client import TextOwner
from stages.gateway.tracing.timeline import RequestTrace
from stages.gateway.tracing.trace_context import TraceContext

SERVICE = web.AppKey("service", Service)
PARSERS = web.AppKey("parsers", ParserPool)
BODY_TURN = web.AppKey("body_turn", asyncio.Lock)  # held by the body that is being added to
BACKLOGS = web.AppKey("backlogs", StreamBacklogs)
GATE = web.AppKey("gate", ConnectionGate)
SCRAPES = web.AppKey("scrapes", Scrapes)

# Set by the middleware before a handler runs.
CALLER = web.RequestKey("caller", Caller)
PRINCIPAL = web.RequestKey("principal", str)  # whom bounds apply to: the tenant, or without API keys the address
CLIENT = web.RequestKey("client", str)  # the client's address, or uid:N on the Unix socket
SCHEME = web.RequestKey("scheme", str)  # http or https, as a trusted proxy says; "": it does not
CLIENT_ID = web.RequestKey("client_id", str)  # a valid X-Request-Id, or ""
STARTED_AT = web.RequestKey("started_at", float)  # of the service's clock
OWN_ID = web.RequestKey("own_id", str)  # of a request for neither text nor vectors
NAMES = web.RequestKey("names", BodyNames)  # of its body
TIMELINE = web.RequestKey("timeline", RequestTrace)  # of a request for vectors
TRACE = web.RequestKey("trace", TraceContext)  # with tracing.otlp
# Set by a handler of text.
CONTINUED = web.RequestKey("continued", Output)  # what another server has computed of the answer
CONVERSATION = web.RequestKey("conversation", list)  # the messages before the input, as an orchestrator keeps them
MAY_ADD = web.RequestKey("may_add", bool)  # what an orchestrator sends after the body is read
STATE = web.RequestKey("state", RequestState)
PAGES = web.RequestKey("pages", str)  # names of the pages of its prompt, for who forwards the answer
KEPT = web.RequestKey("kept", int)  # bytes at the end of its body that an orchestrator stores with it
CLAIM = web.RequestKey("claim", Claim)  # of its conversation

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def request_id(request: web.Request) -> str:
    """Return the client's `X-Request-Id`, or the server's id of the request."""
    return request.get(CLIENT_ID, "") or log_id(request)


def log_id(request: web.Request) -> str:
    """Return the server's id of the request, which the log lines of all stages have."""
    if (state := request.get(STATE)) is not None:
        return state.id
    if (timeline := request.get(TIMELINE)) is not None:
        return timeline.id
    if OWN_ID not in request:
        request[OWN_ID] = new_request_name().id
    return request[OWN_ID]


def text_owner(request: web.Request) -> TextOwner:
    """Return whose texts are in the request, for the log lines of the tokenizer. For requests without sessions."""
    return TextOwner(log_id(request), request[CALLER].tenant)


def is_anthropic(request: web.Request) -> bool:
    """Whether the request is one of Anthropic's API."""
    return request.path == "/v1/messages" or request.path.startswith("/v1/messages/")


def json_response(body: Any, status: int = 200) -> web.Response:
    """Return a response with `body` as JSON."""
    return web.Response(body=to_json(body), status=status, content_type=CONTENT_TYPE)
