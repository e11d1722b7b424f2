"""The beginning of a stream that waits: comments that keep the client's connection alive.

    : loading MODEL: PHASE (3 s)        while its model is loaded
    : waiting for MODEL (15 s)          in the queue

A request whose answer begins, or that is refused, within `QUIET_S` (in the queue: `server.sse_ping_interval_s`) is
answered as any other.  After that the response begins with the comments, so that an error can only be an event; it is
the last one.  That of /v1/responses comes after the opening events: OpenAI's client accepts no other one before them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web

from pipeline.api import response_context, sse
from pipeline.api.error_response import last_events
from pipeline.api.output_tokens import RELAY
from pipeline.api.request_name import HEADER as NAME
from pipeline.api.request_name import RequestName
from pipeline.api.requests.generation_request import GenerationRequest, ResponseFields
from pipeline.api.response_object import failed_response, make_response, refused_events
from pipeline.errors import StarlingError
from stages.gateway.http.context import CALLER, SERVICE, STATE

T = TypeVar("T")

QUIET_S = 0.25  # without a comment: a short load leaves errors their status
INTERVAL_S = 1.0  # between two comments


async def begin_stream(request: web.Request, name: str = "") -> web.StreamResponse:
    """Send the headers of a stream. `name`: the request's id, if it has no state yet."""
    response = web.StreamResponse(headers={**sse.HEADERS, **({NAME: name} if name else {})})
    if request.version < HttpVersion11:
        response.force_close()  # only the end of the connection ends the body
    await response.prepare(request)
    return response


class LoadingStream:
    """One stream. `response` is set from the first comment until it is taken."""

    def __init__(
        self,
        request: web.Request,
        name: RequestName,
        model: str,
        describe: Callable[[], str],
        silent_s: float | None = None,
    ) -> None:
        """`name`: of the request. `model`: as answers name it. `describe` returns what is being waited for.

        `silent_s`: until the first comment, and between two; 0: there are none; None: as while a model is loaded.
        """
        self.response: web.StreamResponse | None = None
        self._request = request
        self._name = name
        self._model = model
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._quiet_until = self._begun + (QUIET_S if silent_s is None else silent_s)
        self._interval_s = INTERVAL_S if silent_s is None else silent_s

    async def until_done(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine and write comments meanwhile. Raises its error."""
        task = asyncio.get_running_loop().create_task(coroutine)
        try:
            await self.until(task)
            return task.result()
        finally:
            if not task.done():  # the client has left
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def until(self, awaited: asyncio.Future[Any]) -> None:
        """Write comments until a future is done. Raises its error."""
        quiet_s = max(0.0, self._quiet_until - self._loop.time()) if self._interval_s else None
        await asyncio.wait({awaited}, timeout=quiet_s)
        while not awaited.done():
            if self.response is None:
                self.response = await begin_stream(self._request, self._name.id)
            await self.response.write(self._comment())
            await asyncio.wait({awaited}, timeout=self._interval_s)
        awaited.result()

    def take(self) -> web.StreamResponse | None:
        """Hand the response over to the events; None: it has not begun."""
        response, self.response = self.response, None
        return response

    async def fail(self, error: StarlingError, generation: GenerationRequest) -> web.StreamResponse:
        """End the stream with an error, in the form of its API. Raises the error if the response has not begun."""
        if self.response is None:  # it has its own status
            raise error
        if generation.endpoint == "responses":
            data = await self._failed_response(error, generation)
        else:
            choices = range(max(1, len(generation.prompts)) * generation.n)
            name = self.response.headers.get("X-Request-Id", "")
            data = last_events(error, choices, is_anthropic=generation.is_anthropic, request_id=name)
        await self.response.write(data)
        await self.response.write_eof()
        return self.response

    async def _failed_response(self, error: StarlingError, generation: GenerationRequest) -> bytes:
        service = self._request.app[SERVICE]
        state = self._request.get(STATE)  # of a request that was admitted, and failed before its answer began
        created = state.spec.created if state is not None else self._name.created
        drawn = state.spec.seed if state is not None else self._name.seed or 0  # 0: none was drawn
        response = make_response(
            generation.response or ResponseFields(),
            request_id=self._name.id,
            created=created or int(service.wall()),
            status="in_progress",
            model=self._model,
            seed=generation.seed if generation.seed is not None else drawn,
        )
        if state is None:  # else `Responses.ended` stores it
            failed = failed_response(response, error)
            await service.responses.refused(generation, self._request[CALLER].tenant, self._name.id, failed)
        *opening, last = refused_events(response, error)
        named = response_context.failed_comment(error.code) if RELAY in self._request.headers else b""
        return b"".join((*opening, named, last))

    def _comment(self) -> bytes:
        comment = sse.comment(f"{self._describe()} ({self._loop.time() - self._begun:.0f} s)")
        return comment + b"\n" if RELAY in self._request.headers else comment  # orchestrators read up to empty lines


def silent_s(request: web.Request) -> float:
    """Return how long nothing may be written to its client; 0: any time. An orchestrator writes comments itself."""
    return 0.0 if RELAY in request.headers else request.app[SERVICE].config.server.sse_ping_interval_s


def queued_stream(request: web.Request) -> LoadingStream:
    """Return that of an admitted request."""
    spec, on_demand = request[STATE].spec, request.app[SERVICE].on_demand
    name = RequestName(spec.id, spec.created)
    return LoadingStream(request, name, spec.shown_model, lambda: on_demand.progress(spec.model), silent_s(request))
