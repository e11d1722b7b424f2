"""Turns of sessions: commits, aborts, and a KV manager that exits at any point."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.api.session_header import EXISTING, HEADER
from pipeline.errors import Overloaded, StarlingError
from pipeline.protocol import messages as m
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.sessions import MAX_PENDING, MAX_TENANT_PENDING, Sessions
from stages.gateway.requests.state import Outcome, RequestState
from stages.kv.sessions.model_sessions import answer
from tests.gateway.kv_peer import MAX_SESSIONS, KvPeer, open_sessions
from tests.gateway.peers import EOS, MODEL, output
from tests.gateway.request_states import make_state
from tests.gateway.server import Server

ME = b"me"
HELLO = m.Hello("kv", 1, 1, 1)


# ------------------------------------------------------------------ without sockets


class World:
    """The gateway's sessions and those of the KV manager, connected by queues that are lost when it exits."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.to_kv: list[m.Frame] = []
        self.to_gateway: list[m.Frame] = []
        self.ended: list[RequestState] = []
        self.relay = Relay(lambda frame: True, lambda: 0.0, self._on_end, lambda r: self.sessions.commit(r))
        self.sessions = Sessions(self.relay, self._send)
        self.is_up = False
        self.kv_comes()

    def _send(self, frame: m.Frame) -> bool:
        self.to_kv.append(frame)
        return True

    def _on_end(self, request: RequestState) -> None:
        self.ended.append(request)
        self.sessions.ended(request)

    def kv_dies(self) -> None:
        if self.is_up:
            self.is_up = False
            self.to_kv.clear()
            self.to_gateway.clear()
            self.sessions.on_down(HELLO)

    def kv_comes(self) -> None:
        if not self.is_up:
            self.is_up = True
            self.kv = open_sessions(self.directory)
            self.sessions.on_up(HELLO)

    def kv_reads(self) -> None:
        if self.to_kv:
            reply = answer(self.kv, ME, self.to_kv.pop(0))
            if reply is not None:
                self.to_gateway.append(reply)

    def gateway_reads(self) -> None:
        if self.to_gateway:
            self.sessions.on_frame(self.to_gateway.pop(0))

    def settle(self) -> None:
        self.kv_comes()
        while self.to_kv or self.to_gateway:
            self.kv_reads()
            self.gateway_reads()
        self.sessions.tick()

    def request(self, ask: GenerationRequest, prompt: tuple[int, ...], number: int) -> RequestState:
        request = make_state(f"req-{number}", ask, tenant="t", prompt=array("i", prompt).tobytes())
        self.sessions.bind(request)
        self.relay.open(request)
        return request

    def finish(self, request: RequestState, tokens: list[int]) -> None:
        (line,) = request.sequences
        if request.outcome is Outcome.OPEN and not line.is_over:
            line.tokens, line.n_emitted = list(tokens), len(tokens)
            self.relay._finish(line, len(tokens))


def begin_turn(world: World, tenant: str = "t", session: str = "s") -> asyncio.Task[Any]:
    """The gateway's task that begins a turn of a session, the first one if there is none."""
    ask = GenerationRequest(endpoint="generate", model=MODEL, session_id=session, creates_session=True)
    return asyncio.ensure_future(world.sessions.begin(MODEL, tenant, ask, ask.cache_salt))


async def begun_turn(world: World) -> GenerationRequest:
    """The request of a turn that the KV manager has begun."""
    turn = begin_turn(world)
    await asyncio.sleep(0)
    world.settle()
    begun, _ = await turn
    assert isinstance(begun, GenerationRequest)
    return begun


async def test_a_turn_whose_client_has_just_left_is_aborted(tmp_path: Path) -> None:
    """The answer comes before the client's task has run."""
    world = World(tmp_path)
    turn = begin_turn(world)
    await asyncio.sleep(0)
    world.kv_reads()
    turn.cancel()
    world.gateway_reads()
    with pytest.raises(asyncio.CancelledError):
        await turn
    world.settle()
    assert not world.kv.all(), "without its first turn there is no session"
    assert not world.sessions._busy and not world.sessions._pending


async def test_turns_of_a_tenant_that_wait_for_the_kv_manager_leave_room_for_those_of_others(tmp_path: Path) -> None:
    world = World(tmp_path)
    busy = [begin_turn(world, "busy", f"s{number}") for number in range(MAX_TENANT_PENDING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="384 of your turns of sessions .* the most of one tenant"):
        await begin_turn(world, "busy", "one-more")
    quiet = [begin_turn(world, "quiet", f"s{number}") for number in range(MAX_PENDING - MAX_TENANT_PENDING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="512 turns of sessions wait for the KV manager"):
        await begin_turn(world, "quiet", "one-more")
    assert len(world.to_kv) == MAX_PENDING
    world.settle()
    await asyncio.gather(*busy, *quiet, return_exceptions=True)  # the KV manager has a bound of its own on sessions
    again = begin_turn(world, "busy", "one-more")
    await asyncio.sleep(0)
    assert len(world.to_kv) == 1, "what was answered does not count"
    world.settle()
    await asyncio.gather(again, return_exceptions=True)


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_a_turn_that_is_being_admitted_is_under_way_at_the_next_kv_manager(
    tmp_path: Path, is_admitted: bool
) -> None:
    """Its prompt is being tokenized, or its journal record written: the relay does not have its request yet."""
    world = World(tmp_path)
    begun = await begun_turn(world)
    if is_admitted:
        world.sessions.bind(make_state("req-1", begun, tenant="t", prompt=b""))
    world.kv_dies()
    world.settle()
    (session,) = world.kv.all()
    assert session.holder == ME, "it could expire, or move to another agent, before the answer is complete"
    assert begun.turn is not None
    world.sessions.abort(MODEL, "t", begun.turn)
    world.settle()
    assert not world.kv.all(), "without its first turn there is no session"
    assert not world.sessions._busy and not world.sessions._begun


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_session_that_was_closed_does_not_come_back_with_the_next_kv_manager(
    tmp_path: Path, is_running: bool
) -> None:
    """Its first turn was being admitted when it was closed, and may have been submitted since."""
    world = World(tmp_path)
    begun = await begun_turn(world)
    closing = asyncio.ensure_future(world.sessions.close(MODEL, "t", "s"))
    await asyncio.sleep(0)
    world.settle()
    await closing
    if is_running:
        world.request(begun, (1, 2), 1)
    world.kv_dies()
    world.settle()
    assert not world.kv.all()


STEPS = st.sampled_from(["kv_reads", "gateway_reads", "kv_dies", "kv_comes", "finish", "leave", "cancel", "tick"])


@given(st.lists(STEPS, max_size=60))
@example(["kv_reads", "gateway_reads", "finish", "kv_reads", "kv_dies"])  # committed, and the answer is lost
@settings(max_examples=150, deadline=None)
def test_the_session_holds_exactly_the_finished_turns(steps: list[str]) -> None:
    """A turn whose client disconnected during the commit may be held or not."""

    async def run(world: World) -> None:
        held: list[int] = []
        number = 0
        turn: asyncio.Task[Any] | None = None
        request: RequestState | None = None
        output_of: dict[str, list[int]] = {}
        doubtful: list[int] | None = None
        for step in [*steps, "end"]:
            if turn is None and request is None:
                number += 1
                turn = begin_turn(world)
            await asyncio.sleep(0)
            if step in ("kv_reads", "gateway_reads", "kv_dies", "kv_comes"):
                getattr(world, step)()
            elif step == "tick":
                world.sessions.tick()
            elif step == "cancel" and turn is not None:
                turn.cancel()
            elif step == "leave" and request is not None:
                if request.sequences[0].is_over and request.outcome is Outcome.OPEN:
                    doubtful = held + output_of[request.id]
                world.relay.abandon(request)
            elif step == "finish" and request is not None:
                world.finish(request, [number])
            elif step == "end":
                world.settle()
            for _ in range(3):
                await asyncio.sleep(0)
            if turn is not None and turn.done():
                if turn.cancelled() or turn.exception() is not None:
                    if not turn.cancelled():  # aborted a moment ago, and the KV manager has not answered yet
                        error = turn.exception()
                        assert isinstance(error, StarlingError)
                        assert error.code == "CONFLICT"
                else:
                    ask, tokens = turn.result()
                    if list(tokens) != held:
                        assert list(tokens) == doubtful
                    held, doubtful = list(tokens), None
                    request = world.request(ask, (*tokens, 1000 + number), number)
                    output_of[request.id] = [1000 + number, number]
                turn = None
            if request is not None and request.outcome is not Outcome.OPEN:
                assert request.error is None
                if request.outcome is Outcome.FINISHED:
                    held = held + output_of[request.id]
                request = None
        if turn is not None:
            turn.cancel()
        if request is not None:
            world.finish(request, [number])
            world.settle()
            assert request.outcome is Outcome.FINISHED
            held = held + output_of[request.id]
        for _ in range(3):
            await asyncio.sleep(0)
        world.settle()
        assert world.sessions._busy == {}
        assert world.sessions._pending == {}
        (kept,) = [list(s.tokens) for s in world.kv.all()] or [[]]
        assert kept in (held, doubtful)
        assert all(not s.holder for s in world.kv.all())

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(World(Path(directory))))


# ------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def kv(server: Server, homes: Callable[[], Path]) -> Iterator[KvPeer]:
    peer = KvPeer(server.config, homes())
    yield peer
    peer.stop()


def turn(server: Server, prompt: Any, session: str | None, status: int = 200, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 20, "seed": 7, "ignore_eos": True, **more}
    if session is not None:
        body["session_id"] = session
    got = server.post("/v1/generate", body)
    assert got.status == status, got.body
    answer: dict[str, Any] = got.json if status == 200 else got.error
    return answer


def close(server: Server, session: str, status: int = 200) -> Any:
    got = server.post("/v1/session/close", {"session_id": session})
    assert got.status == status, got.body
    return got.json


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_a_turn_continues_the_session(server: Server, kv: KvPeer) -> None:
    first = turn(server, "One. ", "")
    name = first["session_id"]
    assert name.startswith("sess-")
    second = turn(server, "Two. ", name)
    assert second["session_id"] == name
    history = ids("One. ") + first["choices"][0]["tokens"] + ids("Two. ")
    once = turn(server, history, None)
    assert "session_id" not in once
    assert second["choices"] == once["choices"]
    assert second["usage"] == once["usage"]
    assert second["usage"]["prompt_tokens"] == len(history)
    held = history + second["choices"][0]["tokens"]
    assert kv.held(name) == held
    events = server.stream("/v1/generate", {"prompt": "", "max_tokens": 5, "session_id": name}).all()
    assert events[-2].data["session_id"] == name
    tokens = [token for event in events[:-1] for token in event.data.get("tokens", [])]
    assert kv.held(name) == held + tokens
    assert close(server, name) == {"model": MODEL, "session_id": name, "closed": True}
    for error in (close(server, name, 404)["error"], turn(server, "x", name, 404)):
        assert (error["code"], error["param"]) == ("NOT_FOUND", "session_id")
    assert kv.count() == 0


def test_a_sender_can_ask_for_a_session_that_exists(server: Server, kv: KvPeer) -> None:
    """As an orchestrator does, before it lets one server begin it."""
    body = {"prompt": "x", "max_tokens": 2, "session_id": "mine", "create_session": True, "session_ttl_s": 60}
    existing = {HEADER: EXISTING}
    assert server.post("/v1/generate", body, existing).status == 404 and kv.count() == 0
    assert server.post("/v1/generate", body).status == 200
    assert server.post("/v1/generate", body, existing).status == 200
    assert server.post("/v1/generate", {**body, "session_id": ""}, existing).error["param"] == HEADER
    assert server.post("/v1/generate", body, {HEADER: "new"}).error["param"] == HEADER
    close(server, "mine")


def test_a_session_can_be_named_and_does_not_hold_the_stop(server: Server, kv: KvPeer) -> None:
    assert turn(server, "x", "mine", 404)["param"] == "session_id"
    first = turn(server, "x", "mine", create_session=True, stop=["zu"], ignore_eos=False, max_tokens=200)
    assert first["session_id"] == "mine"
    assert kv.held("mine") == ids("x") + first["choices"][0]["tokens"]
    assert EOS not in kv.held("mine")
    turn(server, "y", "mine", create_session=True)
    kv.do(lambda: setattr(kv, "late_s", 3601.0))
    assert turn(server, "z", "mine", 404)["code"] == "NOT_FOUND"
    kv.do(lambda: setattr(kv, "late_s", 0.0))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"session_id": 7}, "session_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"session_id": "x", "session_ttl_s": 5}, "session_ttl_s"),
        ({"session_id": "", "session_ttl_s": -1}, "session_ttl_s"),
        ({"session_id": "", "session_ttl_s": 0}, "session_ttl_s"),
        ({"session_id": "", "n": 2}, "n"),
        ({"session_id": "", "cache_salt": "a\0b"}, "cache_salt"),
        ({"session_id": "", "max_tokens": 4097}, "max_tokens"),
        ({"session_id": "", "prompt": [999]}, "prompt"),
    ],
)
def test_refused_turns_leave_nothing(server: Server, kv: KvPeer, more: dict[str, Any], param: str) -> None:
    got = server.post("/v1/generate", {"prompt": "x", "max_tokens": 20, **more})
    assert (got.status, got.error["param"]) == (400, param)
    # The error response may arrive before the KV manager has received the abort.
    deadline = time.monotonic() + 60
    while kv.count() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert kv.count() == 0


def test_the_number_of_sessions_is_bounded(server: Server, kv: KvPeer) -> None:
    names = [turn(server, "x", "")["session_id"] for _ in range(MAX_SESSIONS)]
    refused = server.post("/v1/generate", {"prompt": "x", "session_id": "", "max_tokens": 1})
    assert (refused.status, refused.error["code"]) == (429, "OVERLOADED")
    assert "max_sessions" in refused.error["message"]
    assert "Retry-After" in refused.headers
    for name in names:
        close(server, name)
    name = turn(server, "x", "", cache_salt="mine")["session_id"]
    assert turn(server, "x", name, 400, cache_salt="other")["param"] == "cache_salt"
    turn(server, "x", name)
    close(server, name)


def test_concurrent_turns_disconnects_and_closing(server: Server, kv: KvPeer) -> None:
    name = turn(server, "x", "")["session_id"]
    before = kv.held(name)
    body = {"prompt": "y", "session_id": name, "ignore_eos": True, "max_tokens": 300}

    with server.peers.held():
        stream = server.stream("/v1/generate", body)
        server.peers.step(2)
        next(stream.events())
        assert turn(server, "z", name, 409)["code"] == "CONFLICT"
        stream.close()
        while server.peers.do(lambda: bool(server.peers.generator.running)):
            pass  # wait for one round of the peer
    assert kv.held(name) == before
    turn(server, "z", name)

    with server.peers.held():
        stream = server.stream("/v1/generate", {**body, "max_tokens": 200})
        server.peers.step(2)
        next(stream.events())
        close(server, name)
        events = stream.all()
        assert events[-2].data["error"]["code"] == "NOT_FOUND"
    assert kv.count() == 0


def test_an_exit_of_the_kv_manager_loses_nothing(server: Server, kv: KvPeer) -> None:
    first = turn(server, "x", "")
    name = first["session_id"]
    stream = server.stream(
        "/v1/generate", {"prompt": "y", "session_id": name, "ignore_eos": True, "max_tokens": 40, "seed": 7}
    )
    kv.do(kv.die)
    kv.do(kv.begin)
    events = stream.all()
    tokens = [token for event in events[:-1] for token in event.data.get("tokens", [])]
    history = ids("x") + first["choices"][0]["tokens"] + ids("y")
    assert tokens == output(array("i", history).tobytes(), 7, 0, 40)
    assert kv.held(name) == history + tokens

    # The KV manager exits before it receives the commit: the end of the stream waits for its restart.
    kv.do(lambda: setattr(kv, "held_back", m.SessionCommit))
    stream = server.stream("/v1/generate", {"prompt": "", "session_id": name, "max_tokens": 3})
    lost = kv.lost.get(timeout=60)
    assert isinstance(lost, m.SessionCommit)
    kv.do(kv.die)
    kv.do(kv.begin)
    assert stream.all()[-2].data["session_id"] == name
    assert kv.held(name) == history + tokens + list(array("i", lost.tokens))
    close(server, name)
