"""The calls with which a session moves to another agent. An orchestrator decides which, and carries what is sent.

POST /list_sessions   ListSessionsRequest -> ListSessionsResponse
POST /give_session    GiveSessionRequest  -> GiveSessionResponse    the source: what is sent
POST /take_session    TakeSessionRequest  -> TakeSessionResponse    the target: keep a copy
POST /move_session    MoveSessionRequest  -> MoveSessionResponse    a step of the move
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from pipeline.api.json_body import CONTENT_TYPE, to_json
from pipeline.fleet.bodies import (
    GiveSessionRequest,
    ListSessionsRequest,
    MoveSessionRequest,
    Request,
    TakeSessionRequest,
    decode_request,
)
from stages.agent.session_moves.engine_sessions import EngineSessions

Read = Callable[[web.Request], Awaitable[bytes]]  # the body
R = TypeVar("R", bound=Request)


class SessionApi:
    """The handlers."""

    def __init__(self, sessions: EngineSessions) -> None:
        self._sessions = sessions

    def add_routes(self, app: web.Application, read: Read) -> None:
        """Add the paths."""

        def add(path: str, kind: type[R], answer: Callable[[R], Awaitable[msgspec.Struct]]) -> None:
            async def handle(request: web.Request) -> web.Response:
                asked: Any = decode_request(kind, await read(request), request.content_type)
                return web.Response(body=to_json(await answer(asked)), content_type=CONTENT_TYPE)

            app.router.add_post(path, handle)

        add("/list_sessions", ListSessionsRequest, self._sessions.list)
        add("/give_session", GiveSessionRequest, self._sessions.give)
        add("/take_session", TakeSessionRequest, self._sessions.take)
        add("/move_session", MoveSessionRequest, self._sessions.move)
