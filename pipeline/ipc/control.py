"""Control sockets: how a command reaches a running stage. `RUN_DIR/STAGE.control.sock`.

One line of JSON each way: `{"op": "drain", ...}`, answered by `{"ok": true, ...}` or `{"ok": false, "code",
"message"}`.  The run directory has mode 0700, and connections of other users except root are closed (SO_PEERCRED).
Bounds: `MAX_LINE` bytes per line, `MAX_CLIENTS` connections, `IDLE_S` without a line.

`call` is the blocking client.  `ControlServer` serves in an asyncio loop, `control_poll.PollControlServer` in a
loop that polls.
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
    """No process answers on the control socket."""

    def __init__(self, message: str) -> None:
        super().__init__("MODEL_UNAVAILABLE", message)


def socket_path(run_dir: Path, stage: str) -> Path:
    """Where the stage's control socket is."""
    return run_dir / f"{stage}.control.sock"


# ------------------------------------------------------------------ the client


def call(run_dir: Path, stage: str, request: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    """Send a request; the answer without `ok`. Raises `Unreachable`, or the `StarlingError` of the answer."""
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
    """Whether the process at the other end belongs to this user or to root."""
    # A socket object of its own: the transport socket of an event loop may lack getsockopt.
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
        """Bind. The stage holds its lock, so a file at the path is from a predecessor."""
        rundir.clear_socket(f"ipc://{self.path}")
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=MAX_LINE)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Idempotent; connections that wait for an answer are closed."""
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
                await self._serve_lines(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            pass  # disconnected, idle for too long, line too long, or closing
        finally:
            self._clients.discard(task)
            writer.close()

    async def _serve_lines(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            log.exception("control request failed")
            return failed(InternalError("the stage failed to handle the request; see its log"))


def parse(line: bytes) -> dict[str, Any]:
    """Decode a request line. Raises `StarlingError`."""
    try:
        request = json.loads(line)
    except ValueError:
        raise StarlingError("INVALID_REQUEST", "a request is one line of JSON") from None
    if not isinstance(request, dict):
        raise StarlingError("INVALID_REQUEST", "a request is a JSON object")
    return request


def failed(error: StarlingError) -> dict[str, Any]:
    """The answer for an error; `call` raises it."""
    return {"ok": False, "code": error.code, "message": error.message, "param": error.param}
