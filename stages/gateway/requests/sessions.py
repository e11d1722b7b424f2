"""Sessions, as the gateway handles them: a turn begins at the KV manager, is pinned there, and is committed or aborted.

    begin    before the prompt is assembled: the KV manager answers with the tokens that the session holds
    commit   when all text has been sent: the KV manager stores the turn; only then does the request end
    ended    a request that failed or lost its client: the session stays as it was before the turn

Frames leave through an injected function. After a restart of the KV manager, unanswered frames are sent again. The
gateway assigns ids and turns are numbered, so that a repeated frame has no further effect. Two concurrent turns are
refused here, and by the KV manager when two gateways overlap during a handover.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pipeline.api.adapter_salt import without_adapter
from pipeline.api.requests.generation_request import GenerationRequest, SessionTurn
from pipeline.errors import Conflict, InvalidRequest, ModelUnavailable, NotFound, Overloaded
from pipeline.protocol import messages as m
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.state import Outcome, RequestState

log = logging.getLogger("starling.gateway.sessions")

ANSWER_TIMEOUT_S = 10.0  # for one answer of the KV manager, its restart included
RETRY_AFTER_S = 5.0  # in the 503
MAX_PENDING = 512  # unanswered frames; the edge's queue is longer
MAX_TENANT_PENDING = 384  # of one tenant

Key = tuple[str, str, str]  # model, tenant, session
Command = m.SessionBegin | m.SessionCommit | m.SessionClose
_RESUME_OWN = -1  # SessionBegin.resume: a turn of this session that this gateway has under way is this one


def new_id() -> str:
    """A random session id."""
    return "sess-" + secrets.token_urlsafe(18)


@dataclass
class _Pending:
    """An unanswered frame and the function that gets the answer."""

    frame: Command
    on_answer: Callable[[m.Frame], object]


class Sessions:
    """One per gateway, beside its relay."""

    def __init__(self, relay: Relay, send: Callable[[m.Frame], bool]) -> None:
        self._relay = relay
        self._send_frame = send
        self._is_up = False
        self._next_id = 1
        self._pending: dict[int, _Pending] = {}  # by frame id, in the order of sending
        self._outbox: deque[m.Frame] = deque()  # frames that wait because the KV manager's queue is full
        self._busy: dict[Key, str] = {}  # sessions with a turn under way: id of its request, "" before admission
        self._commits: dict[str, int] = {}  # request id -> id of its `SessionCommit`
        # How turns begin again at the next KV manager, also those whose request the relay does not have yet.
        self._begun: dict[Key, m.SessionBegin] = {}

    # ---------------------------------------------------------------- a turn

    async def begin(
        self, model: str, tenant: str, generation: GenerationRequest, salt: str, version: str = ""
    ) -> tuple[GenerationRequest, tuple[int, ...]]:
        """Begin a turn. Returns `generation` with its `turn`, and the tokens that the session holds.

        The caller must then `bind` the admitted request or `abort` the turn. `salt`: the request's own cache salt
        with its tenant's, for a new session; later turns have their session's. `version`: id of the loaded version
        that will compute the turn. Raises `NotFound`, `Conflict`, `Overloaded`, `ResourceError`, `ModelUnavailable`.
        """
        name = generation.session_id or new_id()
        key = model, tenant, name
        if key in self._busy:
            raise Conflict(f"session {name!r} has a turn under way; wait for it", "session_id")
        is_new = generation.creates_session or not generation.session_id
        self._busy[key] = ""
        frame = m.SessionBegin(
            self._number(),
            model,
            tenant,
            name,
            is_new,
            generation.session_ttl_s or 0,
            salt,
            _RESUME_OWN,
            version,
        )
        # If the caller stops waiting, the turn may have begun: `_undo` aborts it when the answer arrives.
        held = await self._request(frame, lambda answer: self._undo(key, answer))
        if isinstance(held, m.SessionRefused):
            del self._busy[key]
            raise held.to_error()
        assert isinstance(held, m.SessionHeld)
        tokens = array("i")
        tokens.frombytes(held.tokens)
        turn = SessionTurn(name, held.turn, len(tokens))
        self._begun[key] = msgspec.structs.replace(frame, create=held.turn == 1, salt=held.salt, resume=held.turn)
        if without_adapter(held.salt)[1] != without_adapter(salt)[1]:
            self.abort(model, tenant, turn)
            raise InvalidRequest(
                f"session {name!r} was begun with another adapter, without one, or with an earlier version of it: "
                f"begin a new session",
                "model",
            )
        # A session of an earlier configuration may have the request's salt alone.
        if generation.cache_salt and held.salt not in (salt, generation.cache_salt):
            self.abort(model, tenant, turn)
            raise InvalidRequest(
                f"session {name!r} was begun with another cache_salt; leave it out in later turns", "cache_salt"
            )
        return msgspec.structs.replace(generation, turn=turn, cache_salt=held.salt), tuple(tokens)

    def _undo(self, key: Key, answer: m.Frame | None) -> None:
        self._busy.pop(key, None)
        if isinstance(answer, m.SessionHeld):
            self._send(m.SessionAbort(*key, answer.turn))

    def abort(self, model: str, tenant: str, turn: SessionTurn) -> None:
        """Abort a turn that `begin` began."""
        key = model, tenant, turn.session
        self._busy.pop(key, None)
        self._begun.pop(key, None)
        self._send(m.SessionAbort(model, tenant, turn.session, turn.number))

    def bind(self, request: RequestState) -> None:
        """The request owns its turn from now on."""
        if request.spec.generation.turn is not None:
            self._busy[_key(request, request.spec.generation.turn)] = request.id

    def commit(self, request: RequestState) -> bool:
        """All text of a request is sent. True: its turn is being committed, and the answer to that ends the request."""
        turn = request.spec.generation.turn
        if turn is None or not turn.number:
            return False
        (sequence,) = request.sequences
        new = request.spec.prompt_of(sequence.spec)[4 * turn.base :]
        new += array("i", sequence.tokens[: sequence.n_emitted]).tobytes()
        frame = m.SessionCommit(
            self._number(), request.spec.model, request.spec.tenant, turn.session, turn.number, turn.base, new
        )
        self._commits[request.id] = frame.id
        self._put(frame, lambda answer: self._on_committed(request, answer))
        return True

    def _on_committed(self, request: RequestState, answer: m.Frame) -> None:
        self._commits.pop(request.id, None)
        if isinstance(answer, m.SessionRefused):
            self._relay.fail(request, answer.to_error())
        else:
            self._relay.complete(request)

    def ended(self, request: RequestState) -> None:
        """The request has its outcome. If it did not finish, its turn is aborted."""
        turn = request.spec.generation.turn
        if turn is None:
            return
        self._pending.pop(self._commits.pop(request.id, 0), None)
        key = _key(request, turn)
        if self._busy.get(key) == request.id:
            del self._busy[key]
            self._begun.pop(key, None)
            if request.outcome is not Outcome.FINISHED:
                self._send(m.SessionAbort(*key, turn.number))

    # ---------------------------------------------------------------- closing

    async def close(self, model: str, tenant: str, session_id: str) -> None:
        """Delete a session with its tokens and pages; a turn under way fails. Raises `NotFound`."""
        answer = await self._request(m.SessionClose(self._number(), model, tenant, session_id), lambda _: None)
        if isinstance(answer, m.SessionRefused):
            raise answer.to_error()
        self._begun.pop((model, tenant, session_id), None)  # not again: nothing of the session is to come back
        request = self._relay.requests.get(self._busy.get((model, tenant, session_id), ""))
        if request is not None:
            gone = NotFound(f"session {session_id!r} was closed while this turn was under way", "session_id")
            self._relay.fail(request, gone)

    # ---------------------------------------------------------------- kv

    def on_frame(self, frame: m.Frame) -> None:
        """A frame from the KV manager."""
        if isinstance(frame, m.SessionHeld | m.SessionDone | m.SessionRefused):
            pending = self._pending.pop(frame.id, None)
            if pending is not None:
                pending.on_answer(frame)

    def on_up(self, hello: m.Hello) -> None:
        """A new KV manager process: pin the turns under way, then repeat the unanswered frames."""
        self._is_up = True
        self._outbox.clear()
        for key, request_id in self._busy.items():
            begin, request = self._begun.get(key), self._relay.requests.get(request_id)
            if begin is not None:
                self._send(msgspec.structs.replace(begin, id=self._number()))
            elif request is not None and request.is_recovered:
                self._pin(request)
        for pending in list(self._pending.values()):
            self._send(pending.frame)

    def on_down(self, hello: m.Hello) -> None:
        """The KV manager has exited."""
        self._is_up = False
        self._outbox.clear()

    @property
    def has_unsent(self) -> bool:
        """Frames wait for a tick to be sent."""
        return bool(self._outbox)

    def tick(self) -> None:
        """At each tick: send frames that wait for the queue, pin the turns of recovered requests."""
        while self._outbox and self._send_frame(self._outbox[0]):
            self._outbox.popleft()
        for request in self._relay.requests.values():
            turn = request.spec.generation.turn
            if request.is_recovered and turn is not None and turn.number:
                key = _key(request, turn)
                if key not in self._busy:
                    self._busy[key] = request.id
                    self._pin(request)

    def _pin(self, request: RequestState) -> None:
        """Begin the turn again. The answer is ignored: the turn's number decides whether its commit is accepted."""
        turn = request.spec.generation.turn
        if turn is not None and turn.number:
            self._send(
                m.SessionBegin(
                    self._number(),
                    request.spec.model,
                    request.spec.tenant,
                    turn.session,
                    turn.number == 1,
                    request.spec.generation.session_ttl_s or 0,
                    request.spec.generation.cache_salt,
                    turn.number,
                    request.spec.version,
                )
            )

    # ---------------------------------------------------------------- frames

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _request(self, frame: Command, on_late_answer: Callable[[m.Frame | None], object]) -> m.Frame:
        """Send a frame and return the answer. Raises `ModelUnavailable` or `Overloaded`.

        If the caller stops waiting, `on_late_answer` gets the answer, or None if there will be none.
        """
        future: asyncio.Future[m.Frame] = asyncio.get_running_loop().create_future()
        is_late = False

        def on_answer(answer: m.Frame) -> None:
            nonlocal is_late
            if future.done():  # the caller has stopped waiting, and its task has not run since
                is_late = True
                on_late_answer(answer)
            else:
                future.set_result(answer)

        try:
            if len(self._pending) >= MAX_PENDING:
                raise Overloaded(
                    f"{MAX_PENDING} turns of sessions wait for the KV manager; try again", retry_after_s=1.0
                )
            if sum(one.frame.tenant == frame.tenant for one in self._pending.values()) >= MAX_TENANT_PENDING:
                raise Overloaded(
                    f"{MAX_TENANT_PENDING} of your turns of sessions wait for the KV manager, the most of one tenant; "
                    "try again",
                    retry_after_s=1.0,
                )
            self._put(frame, on_answer)  # replaced below if the caller stops waiting
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await future
        except BaseException as error:
            if is_late:
                pass
            elif future.done() and not future.cancelled():
                on_late_answer(future.result())
            elif frame.id in self._pending and self._is_up:
                self._pending[frame.id] = _Pending(frame, on_late_answer)
            else:
                self._pending.pop(frame.id, None)
                on_late_answer(None)
            if isinstance(error, TimeoutError):
                raise ModelUnavailable(
                    f"sessions are not available: no answer from kv within {ANSWER_TIMEOUT_S:.0f} s; try again",
                    "session_id",
                    retry_after_s=RETRY_AFTER_S,
                ) from None
            raise

    def _put(self, frame: Command, on_answer: Callable[[m.Frame], object]) -> None:
        self._pending[frame.id] = _Pending(frame, on_answer)
        self._send(frame)

    def _send(self, frame: m.Frame) -> None:
        """Send in order. Nothing is sent while the KV manager is down: `on_up` repeats what is unanswered."""
        if self._is_up and (self._outbox or not self._send_frame(frame)):
            self._outbox.append(frame)


def _key(request: RequestState, turn: SessionTurn) -> Key:
    return request.spec.model, request.spec.tenant, turn.session
