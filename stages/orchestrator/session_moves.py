"""Sessions of an agent that drains move to other agents; moves that have stopped half-way are brought to their end.

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

One orchestrator, the elected one, does this; two that do it at once do no harm.  All find the session afterwards: an
engine that has a tombstone or a copy names the other agent, and relay.py sends the request there.

The KV pages stay: the target computes them with the next turn.  Without sockets.
"""

from __future__ import annotations

import asyncio
import logging
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
from stages.orchestrator.score import loaded

log = logging.getLogger("starling.orchestrator")

CALL_S = 15.0  # of one call; an engine may wait for its disk
MAX_AT_ONCE = 4  # sessions that move at once, of one agent
MAX_TARGETS = 4  # that are tried for one session in one round

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
        self, calls: Calls, nodes: Nodes, router: ScoreRouter, note: Callable[..., object], bind: Bind
    ) -> None:
        self.outcomes: Counter[str] = Counter()  # "moved", "failed"
        self._calls = calls
        self._nodes = nodes
        self._router = router
        self._note = note
        self._bind = bind
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}  # by agent and model

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
        tasks = list(self._tasks.values())
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
            found = await self._call(agent_id, "/list_sessions", asked, ListSessionsResponse)
            async with asyncio.TaskGroup() as group:
                for entry in found.sessions:
                    group.create_task(self._look_after(turns, agent_id, model, entry, is_draining))
            if not found.more or not found.sessions:
                return
            after = found.sessions[-1].tenant, found.sessions[-1].session

    async def _look_after(
        self, turns: asyncio.Semaphore, agent_id: str, model: str, entry: SessionEntry, is_draining: bool
    ) -> None:
        async with turns:
            try:
                if entry.state == "moved":
                    await self._finish(agent_id, entry.agent, model, entry)
                elif entry.state == "arrived":
                    await self._resolve(entry.agent, agent_id, model, entry)
                elif is_draining and not entry.busy:
                    await self._move(agent_id, model, entry)
            except StarlingError as error:
                self.outcomes["failed"] += 1
                log.info(
                    "a session stays as it is for now",
                    extra={
                        "session_id": entry.session,
                        "agent": agent_id,
                        "state": entry.state,
                        "reason": error.message,
                    },
                )

    # ---------------------------------------------------------------- moves

    async def _move(self, source: str, model: str, entry: SessionEntry) -> None:
        """Move a session to the agent that routing prefers; if that refuses, to another one. Raises `StarlingError`."""
        refused: set[str] = set()
        failure: StarlingError = ModelUnavailable(f"no other agent with the same file takes sessions of {model}")
        while len(refused) < MAX_TARGETS and (target := self._target(source, model, refused)):
            give = GiveSessionRequest(model_id=model, tenant=entry.tenant, session=entry.session, agent_id=target)
            given = await self._call(source, "/give_session", give, GiveSessionResponse)
            moving = msgspec.structs.replace(entry, move=given.move)
            try:
                take = TakeSessionRequest(model_id=model, record=given.record)
                await self._call(target, "/take_session", take, TakeSessionResponse)
            except StarlingError as error:
                refused.add(target)
                failure = error
                continue
            try:
                await self._step(source, "give_up", model, moving, target)
            except StarlingError:
                await self._resolve(source, target, model, moving)
                raise
            await self._finish(source, target, model, moving)
            return
        raise failure

    def _target(self, source: str, model: str, refused: set[str]) -> str:
        """The agent that gets a session; "" if none can."""
        table = {view.agent_id: view for view in self._router.table}
        known = loaded(table[source].details, model) if source in table else None
        fit = {
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
        if not fit:
            return ""
        request = RoutedRequest(request_id="", model=model, excluded=frozenset(table.keys() - fit))
        try:
            return self._router.choose(request, "session").agent_id
        except (ModelNotFound, ModelUnavailable, Overloaded):
            return ""

    async def _finish(self, source: str, target: str, model: str, entry: SessionEntry) -> None:
        """The source has given the session up: steps 5 and 6. Raises `StarlingError`."""
        # An error, whatever it says, does not mean that the copy has ended.
        answer = await self._step(target, "activate", model, entry, source)
        if answer.gone:
            # The target had it on its disk before step 4: since then it was closed there, or has moved on.
            log.info("a session that moved is not at its agent any more", extra={"session_id": entry.session})
        self._bind(entry.tenant, entry.session, target)
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
        return await self._call(agent_id, "/move_session", asked, MoveSessionResponse)

    async def _call(self, agent_id: str, path: str, asked: msgspec.Struct, kind: type[T]) -> T:
        record = self._nodes.find(agent_id)
        if record is None:
            raise ModelUnavailable(f"agent {agent_id} is not there")
        raw = await self._calls.post(record, path, msgspec.json.encode(asked), CALL_S)
        try:
            return msgspec.json.decode(raw, type=kind)
        except DECODE_ERRORS as error:
            raise ModelUnavailable(f"agent {agent_id} answers nonsense about sessions: {error}") from None


def keeps_models(view: NodeView) -> bool:
    """Whether idle models must stay loaded: without an engine no heartbeat counts the sessions on the agent's disk."""
    return view.is_draining or any(one.sessions_moving for one in view.details.loaded_models)


def _can_move(one: LoadedModel) -> bool:
    return one.model_state == "READY" and one.moves_sessions
