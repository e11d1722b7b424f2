"""A fleet of three agents with real session stores, whose calls have fates: what moves of sessions are tested on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import ModelUnavailable, NotFound, SessionMoved, StarlingError
from pipeline.fleet import bodies
from pipeline.fleet.records import AgentRecord
from stages.kv.session_exchange import _lister
from stages.kv.sessions import session_transfer as transfer
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_files import SessionFiles
from stages.kv.sessions.session_moves import decode_sent
from stages.kv.sessions.session_store import UNSURE_S, SessionStore
from stages.kv.sessions.session_transfer import Ends
from stages.orchestrator.session_moves import SessionMoves
from tests.kv.test_sessions import ME, ROOTS, Time, raw
from tests.kv.world import PAGE_TOKENS
from tests.orchestrator.agents import DIGEST, MODEL, engine, router, view

NAME = "t", "s"
AGENTS = ("one", "two", "three")
# What may happen to a call.
FATES = (
    *["done"] * 6,
    "lost",
    "not found",
    "late",
    "twice",
    "answer lost",
    "killed after",
    "dies before",
    "dies after",
)


class Agent:
    """An agent's engine: its real session store, on a disk that survives its death."""

    def __init__(self, name: str, folder: Path, clock: Time, **bounds: int) -> None:
        self.name = name
        self.is_up = True
        self._folder, self._clock = folder / name, clock
        self._bounds = SessionBounds(**{"max_sessions": 10, "max_tokens": 1000, **bounds})
        self.start()

    def start(self) -> None:
        """Also after a death: nothing but the files is left."""
        self.store = SessionStore(SessionFiles(self._folder), ROOTS, PAGE_TOKENS, self._bounds, self._clock)

    def ends(self, other: str = "") -> Ends:
        return Ends(DIGEST, "tok", self.name, other)

    def turn(self, *tokens: int, create: bool = False, name: tuple[str, str] = NAME) -> None:
        """A whole turn that appends tokens."""
        session = self.store.begin(ME, *name, create=create, ttl_s=10_000)
        self.store.commit(ME, *name, session.turn, len(session.tokens), raw(*tokens))

    def answer(self, path: str, body: bytes) -> bytes:
        """A call of the agent's API, as far as the engine's part goes."""
        found = msgspec.convert(self._execute(path, body), dict[str, Any])
        return msgspec.json.encode(found)

    def _execute(self, path: str, body: bytes) -> Any:
        store = self.store
        if path == "/list_sessions":
            asked = msgspec.json.decode(body, type=bodies.ListSessionsRequest)
            after = list(asked.after) if asked.after else None
            return _lister({"after": after, "moving": asked.moving})(store, self.ends())
        if path == "/give_session":
            give = msgspec.json.decode(body, type=bodies.GiveSessionRequest)
            sent = transfer.export(store, give.tenant, give.session, self.ends(give.agent_id))
            answer = bodies.GiveSessionResponse(record=sent.encode(), move=sent.move)
            return msgspec.json.decode(msgspec.json.encode(answer))
        if path == "/take_session":
            record = msgspec.json.decode(body, type=bodies.TakeSessionRequest).record
            sent = decode_sent(record)
            assert sent.target == self.name
            transfer.adopt(store, sent)
            return {"move": sent.move}
        assert path == "/move_session", path
        step = msgspec.json.decode(body, type=bodies.MoveSessionRequest)
        key, ends = (step.tenant, step.session, step.move), self.ends(step.agent_id)
        if step.step == "check":
            transfer.check(store, *key, step.agent_id, step.tokens)
        elif step.step == "give_up":
            transfer.give_up(store, *key, ends)
        elif step.step == "refuse":
            return {"given_up": transfer.refuse(store, *key, ends)}
        elif step.step == "activate":
            return {"gone": not transfer.activate(store, *key)}
        else:
            {"settle": transfer.settle, "discard": transfer.discard}[step.step](store, *key)
        return {}


class World:
    """Three agents, and the calls of any number of orchestrators to them. `fate` says what happens to each call."""

    def __init__(self, folder: Path, fate: Callable[[], str] = lambda: "done", **bounds: int) -> None:
        self.clock = Time()
        self.agents = {name: Agent(name, folder, self.clock, **bounds) for name in AGENTS}
        self.clock.now += UNSURE_S
        self.late: list[Callable[[], object]] = []  # calls that are still on their way
        self.fate = fate
        self.bound: dict[tuple[str, str], str] = {}
        self.calls: list[str] = []

    async def post(self, record: AgentRecord, path: str, body: bytes, timeout_s: float) -> bytes:
        """A call of an orchestrator. Raises `StarlingError`; `Death` if the orchestrator dies during it."""
        agent, fate = self.agents[record.agent_id], "done" if path == "/list_sessions" else self.fate()
        step = msgspec.json.decode(body).get("step", path)
        self.calls.append(f"{agent.name} {step}")
        if fate == "late":
            self.late.append(lambda: agent.answer(path, body))
            raise ModelUnavailable("no answer in time")
        if fate == "lost" or not agent.is_up:
            raise ModelUnavailable("it was lost")
        if fate == "not found":  # by an agent of an older release, or by an engine that is starting
            raise NotFound("there is nothing here")
        if fate == "dies before":
            raise Death
        answer = agent.answer(path, body)
        if fate == "twice":
            self.late.append(lambda: agent.answer(path, body))
        if fate == "killed after":
            agent.start()
            self.clock.now += UNSURE_S
        if fate == "dies after":
            raise Death
        if fate == "answer lost":
            raise ModelUnavailable("its answer was lost")
        return answer

    def find(self, agent_id: str) -> AgentRecord | None:
        return AgentRecord(agent_id=agent_id, url="", incarnation="1")

    def round(self, *draining: str) -> None:
        """What a new orchestrator does in one round."""
        views = [view(name, engine(moves_sessions=True), may_start=name not in draining) for name in AGENTS]
        moves = SessionMoves(self, self, router(*views), lambda *args, **more: None, self._bind)

        async def run() -> None:
            for name in AGENTS:
                with contextlib.suppress(StarlingError):
                    await moves.run(name, MODEL, is_draining=name in draining)

        with contextlib.suppress(Death):
            try:
                asyncio.run(run())
            except ExceptionGroup as several:
                _, others = several.split(Death)
                if others is not None:
                    raise

    def _bind(self, tenant: str, session: str, agent: str) -> None:
        self.bound[tenant, session] = agent

    def serving(self, name: tuple[str, str] = NAME) -> list[str]:
        """The agents that would begin a turn of the session now."""
        found = []
        for agent in self.agents.values():
            try:
                session = agent.store.begin(ME, *name)
            except (NotFound, SessionMoved):
                continue
            agent.store.abort(ME, *name, session.turn)
            found.append(agent.name)
        return found

    def tokens(self, name: tuple[str, str] = NAME) -> list[int]:
        (serving,) = self.serving(name)
        session = self.agents[serving].store.find(*name)
        assert session is not None
        return list(session.tokens)


class Death(Exception):
    """Of an orchestrator."""
