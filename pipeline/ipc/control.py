"""Control sockets: how a command speaks to a running stage. `RUN_DIR/STAGE.control.sock`.

A line of JSON each way: `{"op": "drain", ...}` and `{"ok": true, ...}`, or `{"ok": false, "code",
"message"}`.  The run directory is 0700, and a peer of another user is sent away (SO_PEERCRED), root
excepted.  Bounded: `MAX_LINE` bytes for a line, `MAX_CLIENTS` connections, `IDLE_S` without a line.

The client's half blocks and stands alone; the server's half here runs in a stage's asyncio loop, that for loops
that poll is pipeline/ipc/control_poll.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pipeline.errors import InternalError, StarlingError
from pipeline.runtime import run_dir as rundir

log = logging.getLogger("starling.control")

MAX_LINE = 65_536
MAX_CLIENTS = 16
IDLE_S = 60.0
CALL_TIMEOUT_S = 5.0

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Unreachable(StarlingError):
    """Nobody answers on that control socket."""

    def __init__(self, message: str) -> None:
        super().__init__("MODEL_UNAVAILABLE", message)


def socket_path(run_dir: Path, stage: str) -> Path:
    return run_dir / f"{stage}.control.sock"


# ------------------------------------------------------------------ the client


def call(run_dir: Path, stage: str, request: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    """The answer, without `ok`. Raises `Unreachable`, or the `StarlingError` that the stage answers."""
    path = socket_path(run_dir, stage)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            if not is_ours(connection.fileno()):
                raise Unreachable(f"{path} belongs to another user")
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline()
        except TimeoutError:
            raise Unreachable(f"the {stage} has not answered within {timeout_s:g} s on {path}") from None
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise Unreachable(
                f"the {stage} does not answer on {path}: {error.strerror}; `starling status` shows what runs here"
            ) from None
        except OSError as error:
            raise Unreachable(f"the {stage} does not answer on {path}: {error.strerror}") from None
    if not line.endswith(b"\n"):
        raise Unreachable(f"the {stage} ended before it answered on {path}")
    answer: dict[str, Any] = json.loads(line)
    if not answer.pop("ok"):
        raise StarlingError(answer["code"], answer["message"], answer.get("param", ""))
    return answer


def is_ours(fd: int) -> bool:
    """Whether this user, or root, is at the other end."""
    # A socket of our own: that of an event loop need not know getsockopt.
    with socket.socket(fileno=os.dup(fd)) as connection:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] in (os.getuid(), 0)


# ------------------------------------------------------------------ the server


class ControlServer:
    """A stage's control socket in the running loop. `handler(request)` returns the answer's fields."""

    def __init__(self, run_dir: Path, stage: str, handler: Handler) -> None:
        self.path = socket_path(run_dir, stage)
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind. The stage holds its lock, so what stands at the path was left by a predecessor."""
        rundir.clear_socket(f"ipc://{self.path}")
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=MAX_LINE)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Idempotent; whoever still waits for an answer is left."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for client in list(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) <= MAX_CLIENTS and is_ours(writer.get_extra_info("socket").fileno()):
                await self._converse(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            pass  # gone, silent for too long, a line too long, or we are closing
        finally:
            self._clients.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                line = await reader.readline()
            if not line.endswith(b"\n"):
                return
            writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
            await writer.drain()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return {"ok": True, **await self._handler(parse(line))}
        except StarlingError as error:
            return failed(error)
        except Exception:
            log.exception("a control request failed")
            return failed(InternalError("a fault of the stage; it is in its log"))


def parse(line: bytes) -> dict[str, Any]:
    """The request in a line. Raises `StarlingError`."""
    try:
        request = json.loads(line)
    except ValueError:
        raise StarlingError("INVALID_REQUEST", "a request is one line of JSON") from None
    if not isinstance(request, dict):
        raise StarlingError("INVALID_REQUEST", "a request is a JSON object")
    return request


def failed(error: StarlingError) -> dict[str, Any]:
    """The answer that `call` raises again."""
    return {"ok": False, "code": error.code, "message": error.message, "param": error.param}
