"""Sessions as the gateway sees them: a turn begins at kv, is pinned there, and is kept or leaves nothing.

    begin   before the prompt is put together: kv answers with what the session holds
    finish  when the last text is out: kv keeps the turn, and only then is the request's end told
    ended   of a request that failed or lost its client: the session is what it was before the turn

Frames go out through the function that it is given.  What kv has not answered it is asked again when it comes
back: ids are made here and turns are numbered, so that asking twice is the same as asking once.  Two
turns at once are refused here, and by kv where two gateways overlap (a handover).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.api.fields import Reader, read_fields, text
from pipeline.errors import Conflict, InvalidRequest, ModelUnavailable, NotFound, Overloaded, StarlingError
from pipeline.protocol import messages as m
from pipeline.protocol.messages import MAX_SESSION_ID
from stages.gateway.endpoints.generation_request import GenerationRequest, Turn
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.state import Outcome, RequestState

log = logging.getLogger("starling.gateway.sessions")

ANSWER_S = 10.0  # for one answer of kv, its coming back included
RETRY_AFTER_S = 5.0  # what the 503 says
MAX_ASKED = 512  # unanswered; the edge's queue holds more

Key = tuple[str, str, str]  # model, tenant, session
Asking = m.SessionBegin | m.SessionCommit | m.SessionClose
_RESUME_MINE = -1  # SessionBegin.resume: whatever of this session is under way here, is this


def new_id() -> str:
    return "sess-" + secrets.token_urlsafe(18)


@dataclass
class _Asked:
    frame: Asking
    answered: Callable[[m.Frame], object]


class Sessions:
    """One per gateway, beside its relay."""

    def __init__(self, relay: Relay, send: Callable[[m.Frame], bool]) -> None:
        self._relay = relay
        self._send_frame = send
        self._is_up = False
        self._next_id = 1
        self._asked: dict[int, _Asked] = {}  # in the order of asking
        self._outbox: deque[m.Frame] = deque()  # kv is up and its queue is full
        self._busy: dict[Key, str] = {}  # a turn is under way: of that request, "" before there is one
        self._commits: dict[str, int] = {}  # request -> what kv was asked

    # ---------------------------------------------------------------- a turn

    async def begin(
        self, model: str, tenant: str, ask: GenerationRequest, salt: str, instance: str = ""
    ) -> tuple[GenerationRequest, tuple[int, ...]]:
        """`ask` with its `turn`, and the tokens that the session holds. `abort` it, or `open` its request.

        `salt`: `ask`'s own with its tenant's, for a session that is new; a later turn has its session's.
        `instance`: the version of the model that will compute the turn.
        Raises `NotFound`, `Conflict`, `Overloaded`, `ResourceError`, `ModelUnavailable`.
        """
        name = ask.session_id or new_id()
        key = model, tenant, name
        if key in self._busy:
            raise Conflict(f"session {name!r} has a turn under way; wait for it", "session_id")
        is_new = ask.creates_session or not ask.session_id
        self._busy[key] = ""
        frame = m.SessionBegin(
            self._number(),
            model,
            tenant,
            name,
            is_new,
            ask.session_ttl_s or 0,
            salt,
            _RESUME_MINE,
            instance,
        )
        # Without an answer it may have begun all the same: then it is let go as soon as the answer is here.
        held = await self._ask(frame, lambda answer: self._undo(key, answer))
        if isinstance(held, m.SessionRefused):
            del self._busy[key]
            raise StarlingError(held.code, held.message, held.param)
        assert isinstance(held, m.SessionHeld)
        tokens = array("i")
        tokens.frombytes(held.tokens)
        turn = Turn(name, held.turn, len(tokens))
        if ask.cache_salt and held.salt != salt:
            self.abort(model, tenant, turn)
            raise InvalidRequest(
                f"session {name!r} was begun with another cache_salt; leave it out in later turns", "cache_salt"
            )
        return msgspec.structs.replace(ask, turn=turn, cache_salt=held.salt), tuple(tokens)

    def _undo(self, key: Key, answer: m.Frame | None) -> None:
        self._busy.pop(key, None)
        if isinstance(answer, m.SessionHeld):
            self._send(m.SessionAbort(*key, answer.turn))

    def abort(self, model: str, tenant: str, turn: Turn) -> None:
        """A turn that `begin` began comes to nothing."""
        self._busy.pop((model, tenant, turn.session), None)
        self._send(m.SessionAbort(model, tenant, turn.session, turn.number))

    def open(self, request: RequestState) -> None:
        """The turn is this request's from now on."""
        if request.ask.turn is not None:
            self._busy[_key(request, request.ask.turn)] = request.id

    def finish(self, request: RequestState) -> bool:
        """All its text is out. True: the turn is being kept, and the request ends with the answer to that."""
        turn = request.ask.turn
        if turn is None or not turn.number:
            return False
        (sequence,) = request.sequences
        new = sequence.prompt[4 * turn.base :] + array("i", sequence.tokens[: sequence.end]).tobytes()
        frame = m.SessionCommit(
            self._number(), request.model, request.tenant, turn.session, turn.number, turn.base, new
        )
        self._commits[request.id] = frame.id
        self._put(frame, lambda answer: self._kept(request, answer))
        return True

    def _kept(self, request: RequestState, answer: m.Frame) -> None:
        self._commits.pop(request.id, None)
        if isinstance(answer, m.SessionRefused):
            self._relay.fail(request, StarlingError(answer.code, answer.message, answer.param))
        else:
            self._relay.complete(request)

    def ended(self, request: RequestState) -> None:
        """It has its outcome: without a finish, nothing of the turn is kept."""
        turn = request.ask.turn
        if turn is None:
            return
        self._asked.pop(self._commits.pop(request.id, 0), None)
        key = _key(request, turn)
        if self._busy.get(key) == request.id:
            del self._busy[key]
            if request.outcome is not Outcome.FINISHED:
                self._send(m.SessionAbort(*key, turn.number))

    # ---------------------------------------------------------------- closing

    async def close(self, model: str, tenant: str, session_id: str) -> None:
        """Tokens and pages go at once, and a turn under way ends with an error. Raises `NotFound`."""
        answer = await self._ask(m.SessionClose(self._number(), model, tenant, session_id), lambda _: None)
        if isinstance(answer, m.SessionRefused):
            raise StarlingError(answer.code, answer.message, answer.param)
        request = self._relay.requests.get(self._busy.get((model, tenant, session_id), ""))
        if request is not None:
            gone = NotFound(f"session {session_id!r} was closed while this turn was under way", "session_id")
            self._relay.fail(request, gone)

    # ---------------------------------------------------------------- kv

    def on_frame(self, frame: m.Frame) -> None:
        if isinstance(frame, m.SessionHeld | m.SessionDone | m.SessionRefused):
            asked = self._asked.pop(frame.id, None)
            if asked is not None:
                asked.answered(frame)

    def on_up(self, hello: m.Hello) -> None:
        """A kv that knows of no turn: pin those under way, then ask what is open again."""
        self._is_up = True
        self._outbox.clear()
        for request_id in self._busy.values():
            request = self._relay.requests.get(request_id)
            if request is not None:
                self._pin(request)
        for asked in list(self._asked.values()):
            self._send(asked.frame)

    def on_down(self, hello: m.Hello) -> None:
        self._is_up = False
        self._outbox.clear()

    def tick(self) -> None:
        """Every 100 ms: send what could not be sent; turns of requests that were recovered are pinned."""
        while self._outbox and self._send_frame(self._outbox[0]):
            self._outbox.popleft()
        for request in self._relay.requests.values():
            turn = request.ask.turn
            if request.is_recovered and turn is not None and turn.number:
                key = _key(request, turn)
                if key not in self._busy:
                    self._busy[key] = request.id
                    self._pin(request)

    def _pin(self, request: RequestState) -> None:
        """Whatever the answer is: when the turn is kept, its number decides."""
        turn = request.ask.turn
        if turn is not None and turn.number:
            self._send(
                m.SessionBegin(
                    self._number(),
                    request.model,
                    request.tenant,
                    turn.session,
                    turn.number == 1,
                    request.ask.session_ttl_s or 0,
                    request.ask.cache_salt,
                    turn.number,
                    request.instance,
                )
            )

    # ---------------------------------------------------------------- asking

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _ask(self, frame: Asking, unheard: Callable[[m.Frame | None], object]) -> m.Frame:
        """The answer. Whoever asked and did not wait for it: `unheard` gets it, None if none will come.

        Raises `ModelUnavailable`.
        """
        future: asyncio.Future[m.Frame] = asyncio.get_running_loop().create_future()
        try:
            if len(self._asked) >= MAX_ASKED:
                raise Overloaded(f"{MAX_ASKED} turns of sessions wait for kv; try again", retry_after_s=1.0)
            self._put(frame, future.set_result)  # who gives up takes its place: see below
            async with asyncio.timeout(ANSWER_S):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                unheard(future.result())
            elif frame.id in self._asked and self._is_up:
                self._asked[frame.id] = _Asked(frame, unheard)
            else:
                self._asked.pop(frame.id, None)
                unheard(None)
            if isinstance(error, TimeoutError):
                raise ModelUnavailable(
                    f"sessions are not available: kv has not answered within {ANSWER_S:.0f} s; try again",
                    "session_id",
                    retry_after_s=RETRY_AFTER_S,
                ) from None
            raise

    def _put(self, frame: Asking, answered: Callable[[m.Frame], object]) -> None:
        self._asked[frame.id] = _Asked(frame, answered)
        self._send(frame)

    def _send(self, frame: m.Frame) -> None:
        """In order. To a kv that is down nothing is sent: it forgets turns, and is asked again."""
        if self._is_up and (self._outbox or not self._send_frame(frame)):
            self._outbox.append(frame)


def _key(request: RequestState, turn: Turn) -> Key:
    return request.model, request.tenant, turn.session


# ------------------------------------------------------------------ POST /v1/session/close


_CLOSE: dict[str, Reader] = {"model": text(256, empty=False), "session_id": text(MAX_SESSION_ID, empty=False)}


def read_close(body: dict[str, Any]) -> tuple[str, str]:
    """(model, session id). Raises `InvalidRequest`."""
    values = read_fields(body, _CLOSE, required=("session_id",))
    return values.get("model", ""), values["session_id"]
