"""Control sockets: how a command reaches a running stage. `RUN_DIR/STAGE.control.sock`.

One line of JSON each way: `{"op": "drain", ...}`, answered by `{"ok": true, ...}` or `{"ok": false, "code",
"message"}`.  The run directory has mode 0700, and connections of other users except root are closed (SO_PEERCRED).
Bounds: `MAX_LINE` bytes per line, `MAX_CLIENTS` connections, `IDLE_S` without a line.

`call` is the blocking client, `control_asyncio.ask` one for event loops.  `control_asyncio.ControlServer` serves in an
asyncio loop, `control_poll.PollControlServer` in a loop that polls.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

from pipeline.errors import StarlingError

MAX_LINE = 65_536
MAX_CLIENTS = 16
IDLE_S = 60.0
CALL_TIMEOUT_S = 5.0

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


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


# ------------------------------------------------------------------ for servers


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
