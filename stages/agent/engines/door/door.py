"""The door: what the orchestrators call an engine, in front of an engine that listens for this host's processes alone.

A request is read, translated, and answered from one stream of the engine, whether the client wants a stream or not.
While the agent's lease does not hold, the door is shut: nothing is taken, and what is under way ends.

Errors that another agent may cure are MODEL_UNAVAILABLE or OVERLOADED, also in the middle of a stream.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import aiohttp
import msgspec
from aiohttp import web

from pipeline.api import sse
from pipeline.api.content_coding import decompress
from pipeline.api.error_response import error_response
from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.api.output_text import FIXED, MAX_TEXT_BYTES, TEXT, split_body
from pipeline.api.output_tokens import RELAY
from pipeline.api.request_name import HEADER as NAME
from pipeline.api.request_name import new_request_name, read_request_name
from pipeline.config.schema import EngineConfig
from pipeline.errors import (
    InvalidRequest,
    ModelUnavailable,
    NotFound,
    Overloaded,
    StarlingError,
    TooLarge,
    Unauthenticated,
)
from shm.decoding import DECODE_ERRORS
from stages.agent.engines.dialect import ChatTemplate, Dialect
from stages.agent.engines.door.answers import Formatter
from stages.agent.engines.door.event_stream import MAX_SAID, REFUSALS, EventStream, Piece
from stages.agent.engines.door.request_body import EngineRequest, cache_salt, for_engine, read
from stages.agent.engines.http_session import HttpSession

log = logging.getLogger("starling.agent.door")

BODY_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 30.0  # for the caller to read
CONNECT_S = 5.0
MAX_ERROR_BYTES = 64 << 10  # of the engine's answer to a bad request
MAX_WHOLE = 48 << 20  # bytes at most of an answer that is not streamed: orchestrators take 64 MB of JSON
MAX_KEPT = 256 << 20  # bytes at most of all such answers at a time, but for
SMALL = 1 << 20  # bytes of an answer that is not refused for what others hold
RETRY_AFTER_S = 1.0


class Door:
    """One start of an engine. `url`, `key`: of the engine; `own_key`: that callers must present."""

    def __init__(
        self,
        dialect: Dialect,
        engine: EngineConfig,
        url: str,
        key: str,
        own_key: str,
        session: HttpSession,
        max_body_bytes: int,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._dialect = dialect
        self._engine = engine
        self._url = url
        self._key = key
        self._own_key = own_key
        self._session = session
        self._max_body_bytes = max_body_bytes
        self._n_kept = 0  # bytes of answers that are not streamed
        self._wall = wall
        self._is_open = True
        self._is_draining = False
        self._under_way: set[asyncio.Task[object]] = set()
        self._salt: str | None = None  # of the prompts in the engine's cache
        self._is_mixed = False  # it has prompts of several salts
        self.submitted = 0  # requests that the engine has got
        self.template = ChatTemplate(tools=False, calls=False)  # until the engine has said it

    @property
    def under_way(self) -> int:
        """Requests."""
        return len(self._under_way)

    def app(self) -> web.Application:
        """The application."""
        args = {"access_log": None, "auto_decompress": False}  # what follows the body has no coding
        app = web.Application(client_max_size=self._max_body_bytes + 6 * MAX_TEXT_BYTES, handler_args=args)
        app.router.add_route("*", "/{path:.*}", self._answered)
        return app

    def shut(self) -> None:
        """Take no more requests, and end those under way."""
        self._is_open = False
        for task in self._under_way:
            task.cancel()

    def open(self) -> None:
        """Take requests."""
        self._is_open = True

    def drain(self) -> None:
        """Take no more requests, and let those under way end."""
        self._is_draining = True

    # ------------------------------------------------------------------ a request

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        try:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                given.strip().encode("utf-8", "surrogateescape"), self._own_key.encode()
            ):
                raise Unauthenticated("unknown key; orchestrators get the engine's key from the agent's heartbeat")
            if request.method != "POST" or not request.path.startswith("/v1/"):
                raise NotFound(f"there is no {request.method[:16]} {request.path[:200]} at a model of another engine")
            return await self._generate(request)
        except StarlingError as error:
            shown = error_response(error)
            return web.Response(body=shown.body, status=shown.status, headers=shown.headers, content_type=CONTENT_TYPE)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw, so_far = split_body(request.headers.get(TEXT), await self._body(request))
        if len(raw) > self._max_body_bytes:
            raise self._too_large()
        for header in ("Idempotency-Key", "Last-Event-ID"):
            if header in request.headers:
                raise InvalidRequest(
                    f"{header} is not possible for this model: {self._dialect.name} computes it, and does not give the "
                    f"same answer again; leave it out",
                    header,
                )
        name = read_request_name(request.headers.get(NAME)) or new_request_name()
        coding = request.headers.get("Content-Encoding", "")
        raw = await asyncio.to_thread(decompress, raw, coding, self._max_body_bytes)
        wanted = await asyncio.to_thread(read, request.path, raw, request.content_type, self._dialect, self.template)
        self._check_room()
        may_reuse = self._note_salt(cache_salt(wanted, name))
        asked = for_engine(request.path, wanted, name, self._dialect, so_far, may_reuse=may_reuse)
        created = name.created or int(self._wall())
        formatter = Formatter(wanted, name, created, so_far, asked.form, is_relayed=RELAY in request.headers)
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            return await self._exchange(request, asked, formatter)
        except asyncio.CancelledError:
            if self._is_open or not task.uncancel() == 0:
                raise
            raise self._shut_error() from None
        except ConnectionResetError:  # the caller has left, or does not read
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            self._under_way.discard(task)

    async def _exchange(self, request: web.Request, asked: EngineRequest, formatter: Formatter) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            async with aclosing(self._pieces(asked, formatter)) as pieces:
                async for piece in pieces:
                    formatter.take(piece)
                    # If no other engine can go on, nothing is delivered before the first piece that would be lost.
                    if not asked.request.stream or (response is None and piece.is_empty and not formatter.can_go_on):
                        continue
                    if response is None:
                        response = await self._begin(request, formatter)
                    await self._write(response, formatter.event(piece))
            if not asked.request.stream:
                return web.Response(body=formatter.whole(), content_type=CONTENT_TYPE)
            if response is None:
                response = await self._begin(request, formatter)
            await self._write(response, formatter.closing())
        except StarlingError as error:
            if response is None:
                raise
            await self._write(response, formatter.failure(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if response is None or self._is_open or task is None:
                raise
            task.uncancel()
            await self._write(response, formatter.failure(self._shut_error()))
        await response.write_eof()
        return response

    async def _begin(self, request: web.Request, formatter: Formatter) -> web.StreamResponse:
        fixed = {} if formatter.can_go_on else {TEXT: FIXED}
        response = web.StreamResponse(headers={**sse.HEADERS, **fixed})
        await response.prepare(request)
        await self._write(response, formatter.opening())
        return response

    async def _pieces(self, asked: EngineRequest, formatter: Formatter) -> AsyncGenerator[Piece]:
        """What the engine says, up to the end of the answer. Raises `StarlingError`."""
        if asked.left is not None and asked.left <= 0:  # the engine before has died after the last token
            formatter.end("length")
            yield Piece()
            return
        stream = EventStream(self._dialect, asked.form)
        silent_s = self._engine.answer_timeout_ms / 1000
        kept = 0
        try:
            async with self._session.request(
                "POST",
                self._url + asked.path,
                data=to_json(asked.body),
                headers={"Authorization": f"Bearer {self._key}", "Content-Type": CONTENT_TYPE},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silent_s),
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    raise self._refusal(answer.status, await answer.content.read(MAX_ERROR_BYTES))
                self.submitted += 1
                async for data in answer.content.iter_any():
                    for piece in stream.feed(data):
                        yield piece
                        self._n_kept += formatter.n_kept - kept
                        kept = formatter.n_kept
                        if kept > MAX_WHOLE:
                            raise TooLarge(f"the answer may have more than {MAX_WHOLE} bytes; set max_tokens or stream")
                        if kept > SMALL and self._n_kept > MAX_KEPT:
                            raise Overloaded(
                                f"the answers of {self._dialect.name} that are not streamed have more than {MAX_KEPT} "
                                f"bytes together; set stream, or try again",
                                status=503,
                                retry_after_s=RETRY_AFTER_S,
                            )
                    if stream.is_over:
                        break
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise ModelUnavailable(f"{self._dialect.name} has stopped answering: {reason}") from None
        finally:
            self._n_kept -= kept
        if not stream.is_over or not formatter.has_ended:
            raise ModelUnavailable(f"{self._dialect.name} has broken its answer off")

    # ------------------------------------------------------------------ parts

    def _refusal(self, status: int, body: bytes) -> StarlingError:
        """The engine's error as ours."""
        try:
            error = msgspec.json.decode(body)["error"]
            said = str(error["message"])[:MAX_SAID]
        except (*DECODE_ERRORS, KeyError, TypeError):
            said = body[:200].decode("utf-8", "replace")
        if status in REFUSALS:
            return InvalidRequest(f"{self._dialect.name} refuses the request: {said}")
        if status in (429, 503):
            return Overloaded(f"{self._dialect.name} is busy: {said}", status=503, retry_after_s=RETRY_AFTER_S)
        return ModelUnavailable(f"{self._dialect.name} answers with {status}: {said}", retry_after_s=RETRY_AFTER_S)

    def _check_room(self) -> None:
        if not self._is_open:
            raise self._shut_error()
        if self._is_draining:
            raise StarlingError("DRAINING", "this engine is being unloaded; try another agent", status=503)
        if len(self._under_way) >= self._engine.max_requests:
            raise Overloaded(
                f"{self._engine.max_requests} requests are under way at this engine (max_requests of "
                f"fleet.agent.engines), and no more are taken now; try again",
                status=503,
                retry_after_s=RETRY_AFTER_S,
            )

    def _note_salt(self, salt: str) -> bool:
        """Whether a prompt may use what the engine's cache holds: prompts of one salt alone, or of any if shared."""
        self._is_mixed = self._is_mixed or self._salt not in (None, salt)
        self._salt = salt
        return self._engine.share_cache or self._dialect.separates_tenants or not self._is_mixed

    @staticmethod
    def _shut_error() -> ModelUnavailable:
        return ModelUnavailable("this agent's lease has ended, so that it must not serve; try another agent")

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._max_body_bytes} bytes (server.max_body_mb); send less")

    async def _body(self, request: web.Request) -> bytes:
        """Raises `TooLarge`, a 408."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except TimeoutError:
            late = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
            raise StarlingError("INVALID_REQUEST", late, status=408) from None

    @staticmethod
    async def _write(response: web.StreamResponse, data: bytes) -> None:
        """Raises `ConnectionResetError` if the caller does not read."""
        if data:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(data)
            except TimeoutError:
                raise ConnectionResetError("the caller does not read") from None
