"""aiohttp's protocol of a connection; its own answers, to malformed HTTP and an unknown `Expect`, are like all errors.

aiohttp's own answer is a text that quotes the request, and so are the lines that it logs: keys and prompts included.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from pipeline.api.error_response import error_response
from pipeline.api.json_body import CONTENT_TYPE
from pipeline.errors import StarlingError

# Of an application whose errors have other forms, too: makes the response to a request from the error.
TO_RESPONSE = web.AppKey[Callable[[web.Request, StarlingError], web.StreamResponse]]("to_response")


class HttpConnection(RequestHandler):
    """One per connection."""

    def __init__(self, server: web.Server, peer: str, log: logging.Logger) -> None:
        """`peer`: the client's address, for the log; "": that of the connection."""
        super().__init__(server, loop=asyncio.get_running_loop(), **server._kwargs)
        self.peer = peer
        self._log = log

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        super().connection_made(transport)
        if not self.peer and isinstance(address := transport.get_extra_info("peername"), tuple):
            self.peer = str(address[0])

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer in the form of all errors."""
        super().handle_error(request, status, exc, message)  # logs it, and raises if an answer has begun
        response = _response(http_error(status, exc))
        response.force_close()
        return response

    def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> Coroutine[Any, Any, tuple[web.StreamResponse, bool]]:
        """Send a response. aiohttp refuses an unknown `Expect` before any handler is called, as a text."""
        if isinstance(resp, web.HTTPExpectationFailed):
            found = request.headers.get("Expect", "")[:60]
            text = f"the header Expect is {found!r}, expected '100-continue'; correct it or leave it out"
            error = StarlingError("INVALID_REQUEST", text, status=resp.status)
            assert isinstance(request, web.Request)  # the application has refused it
            to_response = request.app.get(TO_RESPONSE)
            resp = to_response(request, error) if to_response is not None else _response(error)
        return super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """aiohttp answers malformed HTTP with 400 and logs it as an error, which it is of the client alone."""
        error = kw.get("exc_info")
        if not isinstance(error, HttpProcessingError):
            super().log_exception(*args, **kw)
            return
        # Its text quotes the request, keys and prompts included.
        self._log.warning("a client sent malformed HTTP", extra={"client": self.peer, "kind": type(error).__name__})


def _response(error: StarlingError) -> web.Response:
    answer = error_response(error)
    response = web.Response(body=answer.body, status=error.status, headers=answer.headers, content_type=CONTENT_TYPE)
    response.headers["Server"] = "starling"
    return response


def connections(server: web.Server, log: logging.Logger) -> Callable[[], HttpConnection]:
    """What makes the protocol of each connection of a listening socket."""
    return lambda: HttpConnection(server, "", log)


def http_error(status: int, error: BaseException | None) -> StarlingError:
    """What is wrong with a request that aiohttp could not read. A status of 500: with the server."""
    if not isinstance(error, HttpProcessingError):
        text = "internal error of the server; the server's log has the details"
        return StarlingError("INTERNAL", text, status=status)
    if isinstance(error, LineTooLong):
        text = f"a line of the request's head has more than {error.args[1]} bytes; send a shorter one"
    else:
        # The lines after the first one quote the request.
        reason = error.message.partition("\n")[0].strip().rstrip(":")[:200]
        text = f"the request is not valid HTTP: {reason or type(error).__name__}; check what the client sends"
    return StarlingError("INVALID_REQUEST", text, status=status)
