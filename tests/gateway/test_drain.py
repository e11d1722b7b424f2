"""Drains by operators: which requests are rejected, finish or are ended, and who may drain."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StarlingError
from pipeline.ipc import control
from stages.gateway.admission.drain import ALL, Drains, drain_timeout
from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server

SLOW_CLIENTS = "import stages.gateway.http.connection as c; c.FIRST_REQUEST_S = 600.0"  # a `preamble`
TEXT = {"prompt": "words", "max_tokens": 290, "seed": 7, "ignore_eos": True}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_drain_rejects_requests_of_its_model_only() -> None:
    drains = Drains(Clock())
    drains.begin("a", 5.0)
    rejection = drains.rejection("a")
    assert rejection is not None
    assert (rejection.code, rejection.status, rejection.headers()) == ("DRAINING", 503, {"Retry-After": "5"})
    assert "model a" in rejection.message
    assert drains.rejection("b") is None
    assert drains.rejection() is None
    assert (drains.reason("a"), drains.reason("b")) == ("model a is drained", "")


def test_a_drain_of_all_rejects_every_request_until_it_is_lifted() -> None:
    drains = Drains(Clock())
    drains.begin(ALL, 5.0)
    drains.begin("a", 5.0)
    assert drains.rejection("b") is not None
    assert drains.rejection() is not None
    assert drains.lift("b") == []
    assert drains.lift("a") == ["a"]
    assert drains.rejection("a") is not None
    assert drains.lift(ALL) == [ALL]
    assert drains.rejection("a") is None


def test_a_drain_is_due_at_its_deadline() -> None:
    clock = Clock()
    drains = Drains(clock)
    drains.begin("a", 5.0)
    clock.now += 4.9
    assert drains.due() == []
    assert drains.report() == {"a": {"left_s": 0.1, "ended": 0}}
    clock.now += 0.1
    (due,) = drains.due()
    assert "did not finish within 5 s" in drain_timeout(due).message


def test_a_persistent_drain_survives_a_restart() -> None:
    drains = Drains(Clock())
    drains.begin(ALL, 1.0, is_persistent=False)
    assert drains.persistent == {}
    drains.begin(ALL, 2.0)
    drains.begin(ALL, 3.0, is_persistent=False)
    assert drains.persistent == {ALL: 3.0}


# ------------------------------------------------------------------ the process


def ask(server: Server, **request: Any) -> dict[str, Any]:
    return control.call(server.home / "run", "gateway", request, timeout_s=60)


def test_unloading_a_model_lifts_its_drain(make_server: MakeServer) -> None:
    """A model loaded again under the same name accepts requests, in this gateway and after a restart."""
    server = make_server()
    server.wait_ready()
    assert MODEL in ask(server, op="drain", target=MODEL, timeout_s=1.0)["draining"]
    state = ask(server, op="unload", target=MODEL)
    assert state["change"]["done"]
    assert (state["draining"], state["instances"]) == ({}, [])
    server.kill_and_restart()
    deadline = time.monotonic() + 60
    while True:
        try:
            state = ask(server, op="state")
            break
        except control.Unreachable:  # the control socket listens a moment after the HTTP port
            assert time.monotonic() < deadline
    assert state["draining"] == {}


@pytest.mark.parametrize("target", [ALL, MODEL])
def test_streams_finish_and_new_requests_are_rejected(server: Server, target: str) -> None:
    peers = server.peers
    peers.do(lambda: setattr(peers, "is_stepping", False))
    stream = server.stream("/v1/generate", TEXT)
    events = stream.events()
    peers.step()
    begun = [next(events)]
    try:
        state = ask(server, op="drain", target=target, timeout_s=60)
        assert (state["in_flight"], state["models"]) == (1, {MODEL: 1})
        refused = server.post("/v1/generate", TEXT)
        assert (refused.status, refused.error["code"]) == (503, "DRAINING")
        assert refused.headers["Retry-After"] == "5"
        ready = server.get("/ready")
        assert ready.status == 503
        assert "is drained" in ready.json["reason"]
        assert not server.get(f"/v1/models/{MODEL}").json["ready"]
        peers.do(lambda: setattr(peers, "is_stepping", True))
        rest = list(events)
        assert rest[-1].data == "[DONE]"
        assert not [e for e in begun + rest if "error" in e.data]
        assert ask(server, op="state")["draining"][target]["ended"] == 0
    finally:
        stream.close()
        peers.do(lambda: setattr(peers, "is_stepping", True))
        state = ask(server, op="resume", target=target)
    assert state["draining"] == {}
    assert server.ready().status == 200
    assert server.post("/v1/generate", TEXT).status == 200


# Makes the file {path} when the operation `state` begins to wait: no other operation is handled in between.
NOTE_WAITING = """
import pathlib
from stages.gateway.admin import Admin
wait = Admin._wait_until_ready
def note_and_wait(self, request):
    pathlib.Path({path!r}).touch()
    return wait(self, request)
Admin._wait_until_ready = note_and_wait
"""


def test_the_state_is_sent_when_the_server_is_ready_or_after_a_time(make_server: MakeServer, tmp_path: Path) -> None:
    note = tmp_path / "waiting"
    server = make_server(preamble=NOTE_WAITING.format(path=str(note)))
    ask(server, op="drain", target=ALL)
    begun = time.monotonic()
    assert not ask(server, op="state", timeout_s=0.2)["readiness"]["ready"]
    assert time.monotonic() - begun >= 0.19  # the gateway's timers have milliseconds
    note.unlink()
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(server, op="state", timeout_s=60)))
    waiting.start()
    while not note.exists():
        assert waiting.is_alive()
    assert not answers
    ask(server, op="resume", target=ALL)
    waiting.join(60)
    assert answers[0]["readiness"]["ready"]


def test_requests_past_the_deadline_end_with_an_error_that_says_so(server: Server) -> None:
    peers = server.peers
    peers.do(lambda: setattr(peers, "is_stepping", False))
    stream = server.stream("/v1/generate", TEXT)
    events = stream.events()
    peers.step()
    next(events)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(server.post("/v1/generate", TEXT)))
    waiting.start()
    try:
        while ask(server, op="state")["models"][MODEL] < 2:
            pass
        ask(server, op="drain", target=MODEL, timeout_s=0)
        last = [event.data for event in events if "error" in event.data]
        assert [error["error"]["code"] for error in last] == ["DRAINING"]
        waiting.join()
        assert (answers[0].status, answers[0].error["code"]) == (503, "DRAINING")
        assert "did not finish within 0 s" in answers[0].error["message"]
        assert ask(server, op="state")["draining"][MODEL]["ended"] == 2
    finally:
        stream.close()
        peers.do(lambda: setattr(peers, "is_stepping", True))
        ask(server, op="resume")


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"op": "explode"}, "op"),
        ({}, "op"),
        ({"op": "drain", "timeout_s": -1}, "timeout_s"),
        ({"op": "drain", "timeout_s": True}, "timeout_s"),
        ({"op": "drain", "target": 7}, "target"),
        ({"op": "drain", "target": "absent"}, "model"),
        ({"op": "resume", "timeout_s": 1}, "timeout_s"),
        ({"op": "state", "timeout_s": -1}, "timeout_s"),
        ({"op": "drain", "keep": 1}, "keep"),
        ({"op": "drain", "exit": 1}, "exit"),
    ],
)
def test_invalid_commands_change_nothing(server: Server, request_: dict[str, Any], param: str) -> None:
    with pytest.raises(StarlingError) as caught:
        control.call(server.home / "run", "gateway", request_)
    assert caught.value.param == param
    assert ask(server, op="state")["draining"] == {}


def test_http_needs_the_key_of_an_admin(make_server: MakeServer) -> None:
    keys = [{"key": "sk-admin", "admin": True}, {"key": "sk-user"}]
    server = make_server(auth={"api_keys": keys})
    server.wait_ready()
    admin, user = ({"Authorization": f"Bearer {key}"} for key in ("sk-admin", "sk-user"))
    for path in ("drain", "resume"):
        assert server.post(f"/v1/admin/{path}", {}).status == 401
        assert server.post(f"/v1/admin/{path}", {}, user).error["code"] == "FORBIDDEN"
    assert server.get("/v1/admin/state", user).status == 403
    assert server.post("/v1/admin/drain", {"tarqet": "all"}, admin).error["param"] == "tarqet"
    assert server.get("/v1/admin/state", admin).json["draining"] == {}
    null = {"target": None, "timeout_s": None, "keep": None}
    assert list(server.post("/v1/admin/drain", null, admin).json["draining"]) == [ALL]
    assert list(server.post("/v1/admin/drain", {"timeout_s": 3}, admin).json["draining"]) == [ALL]
    assert server.post("/v1/generate", TEXT, user).error["code"] == "DRAINING"
    assert server.post("/v1/admin/resume", {}, admin).json["draining"] == {}
    assert server.post("/v1/generate", TEXT, user).status == 200


def test_a_gateway_without_an_inherited_socket_cannot_hand_over(server: Server) -> None:
    with pytest.raises(StarlingError) as caught:
        ask(server, op="handover", timeout_s=1)
    assert caught.value.code == "CONFLICT"
    assert server.ready().status == 200


def test_new_connections_wait_during_a_handover(homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        held.set_inheritable(True)
        monkeypatch.setenv("STARLING_LISTEN_FD", str(held.fileno()))
        server = Server(homes(), pass_fds=(held.fileno(),))
        try:
            server.wait_ready()
            assert server.port == held.getsockname()[1]
            kept = server.connect()
            kept.request("GET", "/health")
            assert kept.getresponse().read()
            state = ask(server, op="handover", timeout_s=1.0)
            assert state["in_flight"] == 0
            assert kept.sock.recv(1) == b""  # closed, so that the client reconnects
            answers: list[Any] = []
            waiting = threading.Thread(target=lambda: answers.append(server.get("/health")))
            waiting.start()
            # Without a successor the gateway serves the waiting connections after the timeout.
            server.wait_log("no successor has started: accepting connections again")
            waiting.join()
            assert answers[0].status == 200
            kept.close()
        finally:
            assert server.close() == 0


HEAD = "POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
BODY = json.dumps(TEXT)
WHOLE = f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()


@pytest.mark.parametrize("n_sent", [0, len(HEAD)], ids=["nothing", "a part"])
def test_a_handover_waits_for_requests_that_are_on_their_way(
    homes: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, n_sent: int
) -> None:
    """A client may lose its core after it has connected: its connection is not closed."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        held.set_inheritable(True)
        monkeypatch.setenv("STARLING_LISTEN_FD", str(held.fileno()))
        server = Server(homes(), pass_fds=(held.fileno(),), preamble=SLOW_CLIENTS)
        try:
            server.wait_ready()
            with socket.create_connection(("127.0.0.1", server.port), 60) as client:
                client.sendall(WHOLE[:n_sent])
                assert server.get("/health").status == 200  # it was accepted after the other one
                ask(server, op="handover", timeout_s=0.5)
                server.wait_log("no successor has started: accepting connections again")
                client.sendall(WHOLE[n_sent:])
                answer = b""
                while data := client.recv(65536):
                    answer += data
                assert answer.startswith(b"HTTP/1.1 200"), answer
            state = ask(server, op="handover", timeout_s=600)
            while not state["handed_over"]:
                state = ask(server, op="state")
        finally:
            assert server.close() == 0


def test_a_server_without_keys_has_no_admin(server: Server) -> None:
    assert server.post("/v1/admin/drain", {}).error["code"] == "FORBIDDEN"


def test_the_control_socket_is_private_and_removed_at_the_end(homes: Callable[[], Path]) -> None:
    server = Server(homes())
    server.wait_ready()
    path: Path = server.home / "run" / "gateway.control.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    assert server.close() == 0
    assert not path.exists()
