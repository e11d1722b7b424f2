"""A control socket: one line each way, errors by code, bounds, and access by this user only."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pipeline.errors import Conflict, StarlingError
from pipeline.ipc import control, control_asyncio
from pipeline.ipc.control import Unreachable
from pipeline.ipc.control_asyncio import ControlServer


async def answer(request: dict[str, Any]) -> dict[str, Any]:
    match request:
        case {"op": "echo", "value": value}:
            return {"value": value}
        case {"op": "conflict"}:
            raise Conflict("it is taken", "op")
    raise RuntimeError("not foreseen")


@pytest_asyncio.fixture
async def run_dir(tmp_path: Path) -> AsyncIterator[Path]:
    server = ControlServer(tmp_path, "kv", answer)
    await server.start()
    yield tmp_path
    await server.close()
    assert list(tmp_path.iterdir()) == []


async def call(run_dir: Path, **request: Any) -> dict[str, Any]:
    return await asyncio.to_thread(control.call, run_dir, "kv", request, 5.0)


async def test_an_answer(run_dir: Path) -> None:
    assert await call(run_dir, op="echo", value="ä\n") == {"value": "ä\n"}


async def test_a_client_in_an_event_loop(run_dir: Path) -> None:
    question = {"op": "echo", "value": "ä\n"}
    line = await control_asyncio.ask(run_dir, "kv", question, 100)
    assert json.loads(line) == {"ok": True, "value": "ä\n"}
    with pytest.raises(ValueError, match="limit"):
        await control_asyncio.ask(run_dir, "kv", question, 10)
    with pytest.raises(FileNotFoundError):
        await control_asyncio.ask(run_dir, "gateway", question, 100)


async def test_an_error_keeps_its_code(run_dir: Path) -> None:
    with pytest.raises(StarlingError, match="it is taken") as caught:
        await call(run_dir, op="conflict")
    assert (caught.value.code, caught.value.param) == ("CONFLICT", "op")


async def test_a_fault_is_internal_and_the_next_call_is_served(run_dir: Path) -> None:
    with pytest.raises(StarlingError) as caught:
        await call(run_dir, op="other")
    assert caught.value.code == "INTERNAL"
    assert await call(run_dir, op="echo", value=1) == {"value": 1}


async def test_several_lines_and_what_is_no_request(run_dir: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(control.socket_path(run_dir, "kv"))
    for line in (b'{"op": "echo", "value": 1}\n', b"[]\n", b"words\n"):
        writer.write(line)
    lines = [await reader.readline() for _ in range(3)]
    assert b'"value": 1' in lines[0]
    assert b"INVALID_REQUEST" in lines[1]
    assert b"INVALID_REQUEST" in lines[2]
    writer.write(b"x" * (control.MAX_LINE + 2))
    assert await reader.read() == b""  # a line that does not end is left
    writer.close()


async def test_a_successor_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    path = control.socket_path(tmp_path, "kv")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = ControlServer(tmp_path, "kv", answer)
    await server.start()
    assert await call(tmp_path, op="echo", value=2) == {"value": 2}
    await server.close()
    await server.close()


async def test_another_user_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_asyncio, "is_ours", lambda fd: False)
    reader, writer = await asyncio.open_unix_connection(control.socket_path(run_dir, "kv"))
    assert await reader.read() == b""
    writer.close()


def test_other_users_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert control.is_ours(ours.fileno())
        me = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        assert control.is_ours(ours.fileno()) == (me == 0)  # root may


def test_an_absent_stage_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="the kv does not answer"):
        control.call(tmp_path, "kv", {"op": "echo"})


def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(control.socket_path(tmp_path, "kv")))
        silent.listen()
        with pytest.raises(Unreachable, match=r"within 0\.05 s"):
            control.call(tmp_path, "kv", {"op": "echo"}, 0.05)
