"""The control socket of a stage that polls: same answers, and no client can block it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import Config, ModelConfig, ServerConfig
from pipeline.errors import Conflict, StarlingError
from pipeline.ipc import control, control_poll
from pipeline.ipc.control_poll import Later, PollControlServer
from pipeline.ipc.poll_loop import PollLoop

WAIT_S = 60.0


waiting: list[Later] = []


def answer(request: dict[str, Any]) -> dict[str, Any] | Later:
    match request:
        case {"op": "later"}:
            waiting.append(Later())
            return waiting[-1]
        case {"op": "finish", "values": values}:
            for value in values:
                waiting.pop(0).finish({"value": value} if value else Conflict("it was taken meanwhile"))
            return {}
        case {"op": "at once"}:
            found = Later()
            found.finish({"value": 7})
            return found
        case {"op": "echo", "value": value}:
            return {"value": value}
        case {"op": "conflict"}:
            raise Conflict("it is taken", "op")
    raise RuntimeError("not foreseen")


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A loop on a thread, with such a socket."""
    directories = {"run_dir": str(tmp_path / "run"), "arena_dir": str(tmp_path / "shm")}
    config = Config(models=(ModelConfig(name="m"),), server=ServerConfig(**directories))  # type: ignore[arg-type]
    loop = PollLoop("kv", config)
    served = PollControlServer(tmp_path / "run", loop, answer)
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            loop.poll(5)

    thread = threading.Thread(target=serve)
    thread.start()
    yield tmp_path / "run"
    done.set()
    loop.wake()
    thread.join()
    served.close()
    served.close()
    assert not served.path.exists()
    loop.close()


def connect(run_dir: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(WAIT_S)
    client.connect(str(control.socket_path(run_dir, "kv")))
    return client


def call(run_dir: Path, **request: Any) -> dict[str, Any]:
    return control.call(run_dir, "kv", request, WAIT_S)


def test_answers_may_come_later(run_dir: Path) -> None:
    clients = [connect(run_dir) for _ in range(3)]
    for number, client in enumerate(clients, 1):
        client.sendall(b'{"op": "later"}\n')
        while len(waiting) < number:  # others are answered meanwhile
            assert call(run_dir, op="at once") == {"value": 7}
    clients[1].close()
    assert call(run_dir, op="finish", values=[1, 2, 0]) == {}
    assert clients[0].makefile().readline() == '{"ok": true, "value": 1}\n'
    assert '"it was taken meanwhile"' in clients[2].makefile().readline()
    for client in clients:
        client.close()


def test_answers_and_errors_arrive_with_their_code(run_dir: Path) -> None:
    assert call(run_dir, op="echo", value="ä\n") == {"value": "ä\n"}
    with pytest.raises(StarlingError, match="it is taken") as caught:
        call(run_dir, op="conflict")
    assert (caught.value.code, caught.value.param) == ("CONFLICT", "op")
    with pytest.raises(StarlingError, match="failed to handle the request"):
        call(run_dir, op="other")
    assert call(run_dir, op="echo", value=1) == {"value": 1}


def test_several_and_partial_lines_are_handled(run_dir: Path) -> None:
    with connect(run_dir) as client, client.makefile("rb") as lines:
        client.sendall(b'{"op": "echo", "value": 1}\n[]\nwords\n{"op": "echo", ')
        assert b'"value": 1' in lines.readline()
        assert b"INVALID_REQUEST" in lines.readline()
        assert b"INVALID_REQUEST" in lines.readline()
        assert call(run_dir, op="echo", value=2) == {"value": 2}  # an incomplete line blocks no other client
        client.sendall(b'"value": 3}\n')
        assert b'"value": 3' in lines.readline()


def test_a_line_that_is_too_long_closes_the_connection(run_dir: Path) -> None:
    with connect(run_dir) as client:
        client.sendall(b"x" * (control.MAX_LINE + 2))
        assert client.recv(1) == b""


def test_a_client_that_reads_no_answers_is_disconnected(run_dir: Path) -> None:
    with connect(run_dir) as client:
        line = b'{"op": "echo", "value": "' + b"x" * 60_000 + b'"}\n'
        with pytest.raises(OSError, match="Broken pipe|reset"):
            client.sendall(line * 1000)
    assert call(run_dir, op="echo", value=4) == {"value": 4}


def test_clients_are_bounded(run_dir: Path) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(run_dir)) for _ in range(control.MAX_CLIENTS)]
        for client in clients:
            _echo(client)
        with connect(run_dir) as one_more:
            assert one_more.recv(1) == b""
        clients.pop().close()
        _echo(clients[0])  # the loop has accepted both, or will
        assert call(run_dir, op="echo", value=5) == {"value": 5}


def _echo(client: socket.socket) -> None:
    client.sendall(b'{"op": "echo", "value": 0}\n')
    assert client.recv(100).endswith(b"\n")


def test_idle_clients_are_disconnected(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_poll, "IDLE_S", 0.01)
    with connect(run_dir) as client:
        assert client.recv(1) == b""


def test_another_user_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_poll, "is_ours", lambda fd: False)
    with connect(run_dir) as client:
        assert client.recv(1) == b""
