"""Calls of an agent to its engines about sessions: an engine that waits for its disk holds up nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import ModelUnavailable, ResourceError, StarlingError
from pipeline.fleet.bodies import ListSessionsRequest, TakeSessionRequest
from pipeline.ipc import control
from stages.agent.session_moves.engine_sessions import MAX_AT_ONCE, EngineSessions


def test_engines_that_do_not_answer_leave_the_threads_of_the_loop_free(tmp_path: Path) -> None:
    placement = SimpleNamespace(state="READY", engine=SimpleNamespace(control_dir=tmp_path))
    models: Any = SimpleNamespace(find=lambda name: placement)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        sessions = EngineSessions(models, "one")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as engine:
            engine.bind(str(control.socket_path(tmp_path, "kv")))
            engine.listen(MAX_AT_ONCE)
            engine.settimeout(30)
            calls = [asyncio.create_task(sessions.list(ListSessionsRequest(model_id="tiny"))) for _ in range(2)]
            with (await asyncio.to_thread(engine.accept))[0]:
                assert await asyncio.to_thread(lambda: 1) == 1
                assert not any(call.done() for call in calls)
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, StarlingError) for one in found), found

    asyncio.run(run())


def test_sessions_for_which_there_is_no_memory_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    models: Any = SimpleNamespace(find=lambda name: SimpleNamespace(state="LOADING_TO_GPU", engine=None))

    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def run() -> None:
        sessions = EngineSessions(models, "one")
        asked = TakeSessionRequest(model_id="tiny", record=b"")
        with monkeypatch.context() as short:
            short.setattr(os, "memfd_create", refuse)
            for _ in range(MAX_AT_ONCE):
                with pytest.raises(ResourceError, match="Too many open files"):
                    await sessions.take(asked)
        with pytest.raises(ModelUnavailable):  # not `Overloaded`: it has asked for the engine
            await sessions.take(asked)

    asyncio.run(run())


def test_the_memory_of_a_session_outlasts_the_call_however_often_it_is_cancelled(tmp_path: Path) -> None:
    """The engine writes to it by its path: another file could have that by then."""
    placement = SimpleNamespace(state="READY", engine=SimpleNamespace(control_dir=tmp_path))
    models: Any = SimpleNamespace(find=lambda name: placement)

    async def run() -> None:
        sessions = EngineSessions(models, "one")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as engine:
            engine.bind(str(control.socket_path(tmp_path, "kv")))
            engine.listen(1)
            engine.settimeout(30)
            call = asyncio.create_task(sessions.take(TakeSessionRequest(model_id="tiny", record=b"x")))
            with (await asyncio.to_thread(engine.accept))[0]:
                for _ in range(3):
                    call.cancel()
                    for _ in range(3):
                        await asyncio.sleep(0)
                    assert not call.done() and sessions._n_sent == 1
        with pytest.raises(asyncio.CancelledError):
            await call
        assert sessions._n_sent == 0

    asyncio.run(run())
