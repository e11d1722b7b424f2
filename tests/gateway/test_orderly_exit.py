"""A gateway that is stopped in order: what its successor continues, and what it waits for and ends itself."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StarlingError
from pipeline.ipc import control
from stages.gateway.requests.journal import Journal
from stages.gateway.requests.readers import FanOutSink, outlives_gateway
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.state_writer import StateWriter
from starling.cli.restart import handed_over
from tests.gateway.on_demand import ANN, Gateway
from tests.gateway.request_states import make_state
from tests.gateway.response_bodies import assembled, parse_events, read_events, said
from tests.gateway.server import MakeServer, Server
from tests.gateway.test_background import generation

PATH = "/v1/responses"
UNSEEDED: dict[str, Any] = {"prompt": "by chance", "max_tokens": 40, "ignore_eos": True}
KEY = {"Idempotency-Key": "k"}
# A `preamble`.
NOTE_TICKS = """
from stages.gateway.stage import GatewayStage, log
look = GatewayStage._tick_handover
def look_and_note(self):
    look(self)
    log.info("handover tick")
GatewayStage._tick_handover = look_and_note
"""


def ask(server: Server, **request: Any) -> dict[str, Any]:
    return control.call(server.home / "run", "gateway", request, timeout_s=60)


def hold(server: Server, is_held: bool = True) -> None:
    server.peers.do(lambda: setattr(server.peers, "is_stepping", not is_held))


def begin_stream(
    server: Server, path: str, body: Any, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """Begin a stream. `close` of the answer resets its connection, which the server notices at once."""
    connection = server.connect()
    head = {"Content-Type": "application/json", "Connection": "close", **(headers or {})}
    connection.connect()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.request("POST", path, json.dumps({**body, "stream": True}), head)
    answer = connection.getresponse()
    assert answer.status == 200
    return answer


def leave_keyed(server: Server) -> dict[str, int]:
    """Send a request with a key, whose client leaves. Returns the counts of the gateway after that."""
    stream = begin_stream(server, "/v1/generate", UNSEEDED, KEY)
    stream.close()
    while (state := ask(server, op="state"))["in_flight"]:
        pass
    return {name: state[name] for name in ("in_flight", "unfinished")}


def stop(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)


def finished(server: Server, name: str) -> dict[str, Any]:
    """The response `name` when it has ended, which a reader of its request waits for."""
    server.get("/v1/requests/" + name.replace("resp_", "req-"))
    found: dict[str, Any] = server.get(f"{PATH}/{name}").json
    return found


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses_in_the_background_go_on_in_the_successor(make_server: MakeServer, is_streamed: bool) -> None:
    server = make_server()
    server.wait_ready()
    hold(server)
    sent = said("later", background=True, stream=is_streamed)
    if is_streamed:
        stream = begin_stream(server, PATH, sent)
        server.peers.step(3)
        (first,) = parse_events(stream.readline() + stream.readline() + stream.readline() + stream.readline())
        name = first.data["response"]["id"]
        stream.close()
        while ask(server, op="state")["in_flight"]:
            pass
    else:
        name = server.post(PATH, sent).json["id"]
        server.peers.step(3)
    stop(server)
    server.start_successor()
    assert not server.peers.do(lambda: server.peers.generator.cancelled)
    assert server.get(f"{PATH}/{name}").json["status"] in ("queued", "in_progress")
    hold(server, False)
    response = finished(server, name)
    (item,) = response["output"]
    assert (response["status"], item["content"][0]["text"]) == ("completed", "later")
    server.post(PATH, said("two", previous_response_id=name))


def test_a_reader_of_a_stream_in_the_background_reads_on_at_the_successor(make_server: MakeServer) -> None:
    """After `drain_timeout_ms` its connection ends, and no event says that the response has failed."""
    server = make_server(server={"drain_timeout_ms": 100})
    server.wait_ready()
    hold(server)
    stream = begin_stream(server, PATH, said("later", background=True))
    server.peers.step(3)
    stop(server)
    with pytest.raises(http.client.IncompleteRead) as cut:
        stream.read()
    begun = parse_events(cut.value.partial)
    server.start_successor()
    hold(server, False)
    name, number = begun[0].data["response"]["id"], begun[-1].data["sequence_number"]
    rest = read_events(server, f"{PATH}/{name}?stream=true&starting_after={number}")
    assert assembled([*begun, *rest])["status"] == "completed"


def test_a_request_with_a_key_goes_on_in_the_successor_when_its_client_has_left(make_server: MakeServer) -> None:
    server = make_server()
    server.wait_ready()
    hold(server)
    assert leave_keyed(server) == {"in_flight": 0, "unfinished": 0}
    ids = server.peers.do(lambda: {frame.request for frame in server.peers.generator.submitted})
    stop(server)
    server.start_successor()
    hold(server, False)
    answer = server.stream("/v1/generate", UNSEEDED, KEY).all()
    assert {event.id.partition(":")[0] for event in answer[:-1] if event.id} == ids
    assert server.peers.do(lambda: {frame.request for frame in server.peers.generator.submitted}) == ids


def test_what_no_journal_has_is_finished_before_the_exit(make_server: MakeServer) -> None:
    server = make_server(server={"journal_mb": 0, "drain_timeout_ms": 600_000})
    server.wait_ready()
    hold(server)
    name = server.post(PATH, said("later", background=True)).json["id"]
    assert leave_keyed(server) == {"in_flight": 0, "unfinished": 2}
    stop(server)
    assert server.wait_log("draining")["in_flight"] == 2
    hold(server, False)
    server.start_successor()
    assert server.get(f"{PATH}/{name}").json["status"] == "completed"


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_handover_waits_for_what_would_be_lost(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, has_journal: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        held.set_inheritable(True)
        monkeypatch.setenv("STARLING_LISTEN_FD", str(held.fileno()))
        sections = {"server": {"journal_mb": 64 if has_journal else 0}}
        server = Server(homes(), pass_fds=(held.fileno(),), preamble=NOTE_TICKS, **sections)
        try:
            server.wait_ready()
            hold(server)
            server.post(PATH, said("later", background=True))
            state = ask(server, op="handover", timeout_s=600)
            server.wait_log("handing over")
            if has_journal:
                assert state["unfinished"] == 0
            else:
                assert (state["unfinished"], state["handed_over"]) == (1, False)
                for _ in range(2):
                    server.wait_log("handover tick")
                assert not ask(server, op="state")["handed_over"]
                hold(server, False)
            while not state["handed_over"]:
                state = ask(server, op="state")
            assert state["unfinished"] == 0
        finally:
            hold(server, False)
            assert server.close() == 0


def test_a_restart_with_a_socket_of_its_own_ends_only_what_has_a_client(make_server: MakeServer) -> None:
    """No supervisor holds the listening socket, and a stream takes longer than --drain-timeout."""
    server = make_server()
    server.wait_ready()
    hold(server)
    name = server.post(PATH, said("later", background=True)).json["id"]
    leave_keyed(server)
    ids = server.peers.do(lambda: {frame.request for frame in server.peers.generator.submitted})
    stream = server.stream("/v1/generate", UNSEEDED)
    assert handed_over(server.home / "run", 0.1) == 1
    assert stream.all()[0].data["error"]["code"] == "DRAINING"
    stop(server)
    server.start_successor()
    hold(server, False)
    assert finished(server, name)["status"] == "completed"
    answer = server.stream("/v1/generate", UNSEEDED, KEY).all()
    assert {event.id.partition(":")[0] for event in answer[:-1] if event.id} < ids


# ------------------------------------------------------------------ without sockets


class Clocked(Gateway):
    """A gateway with one response in the background that the journal has."""

    def background(self) -> RequestState:
        (version,) = self.catalog.versions("a")
        state = make_state("req-" + "1" * 24, generation(), tenant=ANN.tenant, model="a", version=version.id)
        state.sink, state.is_journaled = FanOutSink(), True
        self.service.relay.open(state)
        return state


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_request_that_the_journal_has_no_room_for_would_be_lost(tmp_path: Path, is_full: bool) -> None:
    gateway = Gateway(tmp_path)
    service = gateway.service
    writer = service.recovery.journal = StateWriter(Journal(tmp_path / "journal", 1 if is_full else 1 << 20, lambda: 0))
    request = await gateway.start("a")
    try:
        assert request.is_journaled == (not is_full)
        assert service.in_flight.would_be_lost == is_full
        assert service.lifecycle.end_all(StarlingError("DRAINING", "it ends"), is_exit=True) == is_full
        assert service.lifecycle.leave_to_successor() == (not is_full)
    finally:
        writer.close()


async def test_what_is_left_has_no_end_and_no_more_tokens(tmp_path: Path) -> None:
    gateway = Clocked(tmp_path)
    service, left = gateway.service, gateway.background()
    other = await gateway.start("a")  # there is no journal
    ended: list[RequestState] = []
    service.recovery.record_end = ended.append  # type: ignore[method-assign]
    assert not outlives_gateway(other)
    assert service.lifecycle.end_all(StarlingError("DRAINING", "it ends"), is_exit=True) == 1
    assert (ended, other.outcome) == ([other], Outcome.FAILED)
    assert service.lifecycle.leave_to_successor() == 1
    gateway.end(left)
    gateway.tick()
    assert (ended, left.outcome) == ([other], Outcome.OPEN)
    assert not service.relay.requests and not service.relay.sequences


async def test_a_response_that_is_being_stored_at_the_exit_ends(tmp_path: Path) -> None:
    gateway, may_store = Clocked(tmp_path), threading.Event()
    service, state = gateway.service, gateway.background()
    service.responses.store.calls.add(may_store.wait)
    gateway.end(state)
    assert service.lifecycle.end_all(StarlingError("DRAINING", "it ends"), is_exit=True) == 0
    assert service.lifecycle.leave_to_successor() == 0
    may_store.set()
    service.responses.store.close(timeout_s=60)
    await asyncio.sleep(0)
    assert state.outcome is Outcome.FINISHED
