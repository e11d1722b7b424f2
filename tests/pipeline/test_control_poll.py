"""The control socket of a stage that polls: it answers as the other one does, and nobody can make it wait."""

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
from pipeline.ipc.control_poll import PollControlServer
from pipeline.ipc.poll_loop import PollLoop

WAIT_S = 10.0


def answer(request: dict[str, Any]) -> dict[str, Any]:
    match request:
        case {"op": "echo", "value": value}:
            return {"value": value}
        case {"op": "conflict"}:
            raise Conflict("it is taken", "op")
    raise RuntimeError("not foreseen")


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Of a loop that runs on a thread with such a socket."""
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


def test_answers_and_errors_by_their_code(run_dir: Path) -> None:
    assert call(run_dir, op="echo", value="ä\n") == {"value": "ä\n"}
    with pytest.raises(StarlingError, match="it is taken") as caught:
        call(run_dir, op="conflict")
    assert (caught.value.code, caught.value.param) == ("CONFLICT", "op")
    with pytest.raises(StarlingError, match="failed to handle the request"):
        call(run_dir, op="other")
    assert call(run_dir, op="echo", value=1) == {"value": 1}


def test_several_lines_and_pieces_of_lines(run_dir: Path) -> None:
    with connect(run_dir) as client, client.makefile("rb") as lines:
        client.sendall(b'{"op": "echo", "value": 1}\n[]\nwords\n{"op": "echo", ')
        assert b'"value": 1' in lines.readline()
        assert b"INVALID_REQUEST" in lines.readline()
        assert b"INVALID_REQUEST" in lines.readline()
        assert call(run_dir, op="echo", value=2) == {"value": 2}  # half a line holds nobody up
        client.sendall(b'"value": 3}\n')
        assert b'"value": 3' in lines.readline()


def test_a_line_without_an_end_is_left(run_dir: Path) -> None:
    with connect(run_dir) as client:
        client.sendall(b"x" * (control.MAX_LINE + 2))
        assert client.recv(1) == b""


def test_who_takes_no_answers_is_left(run_dir: Path) -> None:
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
        _echo(clients[0])  # the loop has heard of both, or has both still before it
        assert call(run_dir, op="echo", value=5) == {"value": 5}


def _echo(client: socket.socket) -> None:
    client.sendall(b'{"op": "echo", "value": 0}\n')
    assert client.recv(100).endswith(b"\n")


def test_the_silent_are_left(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_poll, "IDLE_S", 0.01)
    with connect(run_dir) as client:
        assert client.recv(1) == b""


def test_another_user_is_sent_away(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_poll, "is_ours", lambda fd: False)
    with connect(run_dir) as client:
        assert client.recv(1) == b""
