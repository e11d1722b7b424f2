"""Sessions of an agent that drains move to other agents, and one whose agent is busy for its next turn, if that is
cheaper (session_cost.py).  Moves that have stopped half-way are brought to their end.

    step       call            source           target           who serves the session
    1                          HELD             -                source
    2  give    /give_session   HELD             -                source
    3  take    /take_session   HELD             ARRIVED          source
    4  give_up /move_session   MOVED            ARRIVED          target, after the next step; until then turns wait
    5  activate                MOVED            HELD             target
    6  settle                  SETTLED          HELD             target

Engines have these states on their disks (stages/kv/sessions/session_transfer.py); this process has nothing that must
survive.  Each step may be repeated, and whichever process dies between two of them, what is left says how to go on:

    HELD, -          nothing has happened. A turn that comes changes the session, and then step 4 refuses what was sent
    HELD, ARRIVED    `refuse` at the source: step 4 of this move can not be done any more. Then `discard` at the target
    MOVED, ARRIVED   the same question finds that step 4 was done: steps 5 and 6
    MOVED, HELD      step 6
    MOVED, -         the session was closed or has expired at the target: step 6

While one of the two agents does not answer, the other's part stays as it is.  So a session is served by one agent at
any time, and there is no step at which its only copy could be lost with one process.

One orchestrator, the elected one, does this, but for moves for a turn; two that do it at once do no harm.  All find
the session afterwards: an engine that has a tombstone or a copy names the other agent, and relay.py sends the request
there.

The KV pages are sent between steps 2 and 3 if that is expected to be faster than computing them (session_pages.py);
else the target computes them with the next turn.  Before it the target says whether it has room for the session
(`check`): pages of a session that it would refuse are not sent.  It takes its time, so step 2 is done again after it:
turns that were served meanwhile stop no move.  A move that is tried again sends nothing for `SENT_S`.  Without sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from pipeline.errors import ModelNotFound, ModelUnavailable, Overloaded, StarlingError
from pipeline.fleet.bodies import (
    GiveSessionRequest,
    GiveSessionResponse,
    ListSessionsRequest,
    ListSessionsResponse,
    LoadedModel,
    MoveSessionRequest,
    MoveSessionResponse,
    SessionEntry,
    TakeSessionRequest,
    TakeSessionResponse,
)
from pipeline.fleet.records import AgentRecord
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.interfaces import NodeView, RoutedRequest
from stages.orchestrator.router import ScoreRouter
from stages.orchestrator.score import loaded, version_of
from stages.orchestrator.session_cost import Place, Size, cheapest
from stages.orchestrator.session_pages import SessionPages, Ticket

log = logging.getLogger("starling.orchestrator")

CALL_S = 15.0  # of one call; an engine may wait for its disk
MAX_AT_ONCE = 4  # sessions that move at once, of one agent; in all, for turns
MAX_OF_TENANT = 2  # of those for turns
MAX_TARGETS = 4  # that are tried for one session in one round
PAUSE_S = 10.0  # after a look at a session for a turn: its next turns stay
MAX_PAUSED = 10_000  # sessions of which that is remembered
SENT_S = 300.0  # after pages were sent, or could not be, for a session that then did not move: they are not sent again
MAX_SENT = 10_000  # sessions and targets of which that is remembered
LEAST_WAIT_S = 1.0  # for which a turn waits for the move of its session, or as long as it would wait for its agent
# A turn has come first, or another orchestrator: no failures.
ORDINARY = frozenset({"CONFLICT", "SESSION_MOVED"})

# (tenant, session, agent): where its requests go from now on.
Bind = Callable[[str, str, str], object]
T = TypeVar("T")


class Calls(Protocol):
    """Calls of the agents' API."""

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        """The answer's body. Raises `StarlingError`."""


class Nodes(Protocol):
    """What is asked of the registry."""

    def find(self, agent_id: str) -> AgentRecord | None:
        """The record of an agent."""


class SessionMoves:
    """One per orchestrator. `note(kind, agent=, model=, text=)`: an event."""

    def __init__(
        self,
        calls: Calls,
        nodes: Nodes,
        router: ScoreRouter,
        note: Callable[..., object],
        bind: Bind,
        least_gain_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`least_gain_s`: for which a session moves for a turn; 0: none does. `clock`: monotonic, s."""
        self.pages: SessionPages | None = None  # None: none are sent
        self.is_store_up: Callable[[], bool] = lambda: True  # while it is not, no session moves for a turn
        self.outcomes: Counter[str] = Counter()  # "moved", "failed"
        self._calls = calls
        self._nodes = nodes
        self._router = router
        self._note = note
        self._bind = bind
        self._least_gain_s = least_gain_s
        self._clock = clock
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}  # by agent and model
        self._turns: dict[tuple[str, str], asyncio.Task[str]] = {}  # moves for turns, by tenant and session
        self._under_way: set[tuple[str, str]] = set()  # sessions of all moves here, likewise
        self._paused: dict[tuple[str, str], float] = {}  # until when, s of the clock; the oldest first
        self._sent: dict[tuple[str, str, str], float] = {}  # by tenant, session and target; likewise

    def begin_round(self) -> None:
        """Look after all agents that drain or have moves that are not complete. One round at a time for each."""
        for view in self._router.table:
            for one in view.details.loaded_models:
                key = view.agent_id, one.model_id
                is_due = one.sessions_moving > 0 or (view.is_draining and one.sessions > 0)
                if is_due and view.health == "READY" and _can_move(one) and key not in self._tasks:
                    task = asyncio.get_running_loop().create_task(self._run(view, one))
                    self._tasks[key] = task
                    task.add_done_callback(partial(self._ended, key))

    def _ended(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("sessions were not moved", extra={"agent": key[0], "model": key[1]}, exc_info=error)

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = [*self._tasks.values(), *self._turns.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, view: NodeView, one: LoadedModel) -> None:
        before = self.outcomes["moved"]
        try:
            await self.run(view.agent_id, one.model_id, is_draining=view.is_draining)
        except StarlingError as error:
            log.warning(
                "sessions cannot be moved now",
                extra={"agent": view.agent_id, "model": one.model_id, "reason": error.message},
            )
        if moved := self.outcomes["moved"] - before:
            text = f"{moved} sessions go on elsewhere"
            self._note("sessions-moved", agent=view.agent_id, model=one.model_id, text=text)

    async def run(self, agent_id: str, model: str, *, is_draining: bool) -> None:
        """Complete the moves of an agent's sessions; of one that drains, move the others. Raises `StarlingError`."""
        after: tuple[str, str] | None = None
        turns = asyncio.Semaphore(MAX_AT_ONCE)
        while True:
            asked = ListSessionsRequest(model_id=model, after=after, moving=not is_draining)
            found = await self.call(agent_id, "/list_sessions", asked, ListSessionsResponse)
            async with asyncio.TaskGroup() as group:
                for entry in found.sessions:
                    group.create_task(self._look_after(turns, agent_id, model, entry, is_draining))
            if not found.more or not found.sessions:
                return
            after = found.sessions[-1].tenant, found.sessions[-1].session

    async def _look_after(
        self, turns: asyncio.Semaphore, agent_id: str, model: str, entry: SessionEntry, is_draining: bool
    ) -> None:
        key = entry.tenant, entry.session
        async with turns:
            if key in self._under_way:  # what was listed is a step of that move, which has not stopped
                return
            self._under_way.add(key)
            try:
                if entry.state == "moved":
                    await self._finish(agent_id, entry.agent, model, entry)
                elif entry.state == "arrived":
                    await self._resolve(entry.agent, agent_id, model, entry)
                elif is_draining and not entry.busy:
                    await self._move(agent_id, model, entry)
            except StarlingError as error:
                self.outcomes["failed"] += error.code not in ORDINARY
                log.info(
                    "a session stays as it is for now",
                    extra={
                        "session_id": entry.session,
                        "agent": agent_id,
                        "state": entry.state,
                        "reason": error.message,
                    },
                )
            finally:
                self._under_way.discard(key)

    # ---------------------------------------------------------------- moves

    async def _move(self, source: str, model: str, entry: SessionEntry) -> None:
        """Move a session to the agent that routing prefers; if that refuses, to another one. Raises `StarlingError`."""
        refused: set[str] = set()
        failure: StarlingError = ModelUnavailable(f"no other agent with the same file takes sessions of {model}")
        while len(refused) < MAX_TARGETS and (target := self._target(source, model, refused)):
            give = GiveSessionRequest(model_id=model, tenant=entry.tenant, session=entry.session, agent_id=target)
            given = await self.call(source, "/give_session", give, GiveSessionResponse)
            if self.pages is not None and self._may_send(give, given):
                try:
                    await self._check(source, give, given)
                except StarlingError as error:
                    refused.add(target)
                    failure = error
                    continue
                ticket = await self.pages.ticket(source, target, model, given)
                given = await self._send_pages(source, give, given, ticket)
            moving = msgspec.structs.replace(entry, move=given.move)
            try:
                await self._take(target, model, given)
            except StarlingError as error:
                refused.add(target)
                failure = error
                continue
            await self._hand_over(source, target, model, moving)
            return
        raise failure

    async def _take(self, target: str, model: str, given: GiveSessionResponse) -> None:
        """Step 3. Raises `StarlingError`."""
        take = TakeSessionRequest(model_id=model, record=given.record)
        await self.call(target, "/take_session", take, TakeSessionResponse)

    async def _hand_over(self, source: str, target: str, model: str, moving: SessionEntry) -> None:
        """Steps 4 to 6. Raises `StarlingError`."""
        try:
            await self._step(source, "give_up", model, moving, target)
        except StarlingError:
            await self._resolve(source, target, model, moving)
            raise
        await self._finish(source, target, model, moving)

    async def _send_pages(
        self, source: str, give: GiveSessionRequest, given: GiveSessionResponse, ticket: Ticket | None
    ) -> GiveSessionResponse:
        """The session as it is after its pages were sent, if that is faster than computing. Raises `StarlingError`."""
        if self.pages is None or ticket is None or not self._may_send(give, given):
            return given
        computing_s = len(given.record) * self._router.place(give.agent_id, give.model_id).prefill_s_per_byte
        if not await self.pages.send(give.agent_id, give.model_id, give.tenant, ticket, computing_s):
            return given
        key = give.tenant, give.session, give.agent_id
        self._sent.pop(key, None)
        self._sent[key] = self._clock() + SENT_S
        while len(self._sent) > MAX_SENT:
            del self._sent[next(iter(self._sent))]
        return await self.call(source, "/give_session", give, GiveSessionResponse)

    def _may_send(self, give: GiveSessionRequest, given: GiveSessionResponse) -> bool:
        """Whether the session has pages that were not sent to that agent lately."""
        until = self._sent.get((give.tenant, give.session, give.agent_id), float("-inf"))
        return bool(given.tails) and self._clock() >= until

    async def _check(self, source: str, give: GiveSessionRequest, given: GiveSessionResponse) -> None:
        """Nothing if the target would take the session now, or does not say. Raises `StarlingError`."""
        view = next((view for view in self._router.table if view.agent_id == give.agent_id), None)
        one = loaded(view.details, give.model_id) if view is not None else None
        if one is None or not one.checks_sessions:
            return
        asked = MoveSessionRequest(
            model_id=give.model_id,
            tenant=give.tenant,
            session=give.session,
            move=given.move,
            step="check",
            agent_id=source,
            tokens=given.tokens,
        )
        await self.call(give.agent_id, "/move_session", asked, MoveSessionResponse)

    # ---------------------------------------------------------------- for a turn

    async def for_turn(self, request_id: str, tenant: str, session: str, model: str, home: str) -> str:
        """The agent that serves a session's turn: `home`, or one to which the session has moved. Raises nothing.

        A move that takes longer than the turn would wait at `home` goes on without it: the engines say where it is.
        """
        key, now = (tenant, session), self._clock()
        if not self._least_gain_s or not self.is_store_up():
            return home  # without the store no orchestrator would tell others where the session is
        at_home, others = self._places(home, model)
        likely = cheapest(at_home, others, Size(0), self._least_gain_s, self._router.weights)
        if (
            likely == home
            or key in self._under_way
            or len(self._turns) >= MAX_AT_ONCE
            or sum(one[0] == tenant for one in self._turns) >= MAX_OF_TENANT
            or now < self._paused.get(key, float("-inf"))
        ):
            return home
        self._paused.pop(key, None)
        self._paused[key] = now + PAUSE_S
        while len(self._paused) > MAX_PAUSED:
            del self._paused[next(iter(self._paused))]
        target = next(one for one in others if one.agent_id == likely)
        work = self._move_for_turn(request_id, tenant, session, model, at_home, target)
        task = self._turns[key] = asyncio.get_running_loop().create_task(work)
        self._under_way.add(key)
        task.add_done_callback(lambda done: self._turn_ended(key))
        await asyncio.wait({task}, timeout=max(LEAST_WAIT_S, at_home.queue_s))
        return task.result() if task.done() and not task.cancelled() else home

    def _turn_ended(self, key: tuple[str, str]) -> None:
        del self._turns[key]
        self._under_way.discard(key)

    async def _move_for_turn(
        self, request_id: str, tenant: str, session: str, model: str, home: Place, target: Place
    ) -> str:
        """The agent that has the session now."""
        source, entry = home.agent_id, SessionEntry(tenant=tenant, session=session, state="held")
        try:
            give = GiveSessionRequest(model_id=model, tenant=tenant, session=session, agent_id=target.agent_id)
            given = await self.call(source, "/give_session", give, GiveSessionResponse)
            ticket = None
            if self.pages is not None:
                ticket = await self.pages.ticket(source, target.agent_id, model, given)
            size = Size(len(given.record))
            if ticket is not None:
                size = size._replace(page_bytes=ticket.given.bytes, sent_part=ticket.part)
            chosen = cheapest(home, [target], size, self._least_gain_s, self._router.weights)
            self._router.note_turn(request_id, model, chosen, home, [target], size)
            if chosen == source:
                return source
            if ticket is not None and self._may_send(give, given):
                await self._check(source, give, given)
            given = await self._send_pages(source, give, given, ticket)
            await self._take(chosen, model, given)
            await self._hand_over(source, chosen, model, msgspec.structs.replace(entry, move=given.move))
        except StarlingError as error:
            self.outcomes["failed"] += error.code not in ORDINARY
            facts = {"session_id": session, "agent": source, "reason": error.message}
            log.info("a session does not move for its turn", extra=facts)
            return source
        self._note("session-moved", agent=source, model=model, text=f"for a turn, to {chosen}")
        return chosen

    def _places(self, home: str, model: str) -> tuple[Place, list[Place]]:
        """A session's agent, and those that can take sessions of the same version from it."""
        at_home = self._router.place(home, model)
        table = {view.agent_id: view for view in self._router.table}
        known = loaded(table[home].details, model) if home in table else None
        if known is None or not _can_move(known) or table[home].health != "READY" or table[home].is_draining:
            return at_home, []
        others = []
        for name in self._fit(home, model, set()):
            one = loaded(table[name].details, model)
            if one is not None and version_of(one) == version_of(known) != "":
                speed = self.pages.speed(home, name, model) if self.pages is not None else 0.0
                others.append(self._router.place(name, model, speed))
        return at_home, others

    # ---------------------------------------------------------------- targets

    def _target(self, source: str, model: str, refused: set[str]) -> str:
        """The agent that gets a session; "" if none can."""
        fit = self._fit(source, model, refused)
        if not fit:
            return ""
        others = frozenset(view.agent_id for view in self._router.table if view.agent_id not in fit)
        request = RoutedRequest(request_id="", model=model, excluded=others)
        try:
            return self._router.choose(request, "session").agent_id
        except (ModelNotFound, ModelUnavailable, Overloaded):
            return ""

    def _fit(self, source: str, model: str, refused: set[str]) -> set[str]:
        """The agents that can take sessions of the model from `source`."""
        table = {view.agent_id: view for view in self._router.table}
        known = loaded(table[source].details, model) if source in table else None
        return {
            view.agent_id
            for view in table.values()
            if view.agent_id != source
            and view.agent_id not in refused
            and view.may_start
            and view.health == "READY"
            and known is not None
            and (one := loaded(view.details, model)) is not None
            and _can_move(one)
            and one.digest == known.digest
        }

    async def _finish(self, source: str, target: str, model: str, entry: SessionEntry) -> None:
        """The source has given the session up: steps 5 and 6. Raises `StarlingError`."""
        # An error, whatever it says, does not mean that the copy has ended.
        answer = await self._step(target, "activate", model, entry, source)
        if answer.gone:
            # The target had it on its disk before step 4: since then it was closed there, or has moved on.
            log.info("a session that moved is not at its agent any more", extra={"session_id": entry.session})
        self._bind(entry.tenant, entry.session, target)
        self._sent.pop((entry.tenant, entry.session, target), None)
        self.outcomes["moved"] += 1
        await self._step(source, "settle", model, entry, target)

    async def _resolve(self, source: str, target: str, model: str, entry: SessionEntry) -> None:
        """The target has a copy: whether it is the session, the source decides. Raises `StarlingError`."""
        answer = await self._step(source, "refuse", model, entry, target)
        if answer.given_up:
            await self._finish(source, target, model, entry)
        else:
            await self._step(target, "discard", model, entry, source)

    # ---------------------------------------------------------------- calls

    async def _step(self, agent_id: str, step: Any, model: str, entry: SessionEntry, other: str) -> MoveSessionResponse:
        asked = MoveSessionRequest(
            model_id=model, tenant=entry.tenant, session=entry.session, move=entry.move, step=step, agent_id=other
        )
        return await self.call(agent_id, "/move_session", asked, MoveSessionResponse)

    async def call(
        self, agent_id: str, path: str, asked: msgspec.Struct, kind: type[T], timeout_s: float = CALL_S
    ) -> T:
        """A call of an agent's API; the answer. Raises `StarlingError`."""
        record = self._nodes.find(agent_id)
        if record is None:
            raise ModelUnavailable(f"agent {agent_id} is not there")
        raw = await self._calls.post(record, path, msgspec.json.encode(asked), timeout_s)
        try:
            return msgspec.json.decode(raw, type=kind)
        except DECODE_ERRORS as error:
            raise ModelUnavailable(f"agent {agent_id} answers nonsense about sessions: {error}") from None


def keeps_models(view: NodeView) -> bool:
    """Whether idle models must stay loaded: without an engine no heartbeat counts the sessions on the agent's disk."""
    return view.is_draining or any(one.sessions_moving for one in view.details.loaded_models)


def _can_move(one: LoadedModel) -> bool:
    return one.model_state == "READY" and one.moves_sessions
