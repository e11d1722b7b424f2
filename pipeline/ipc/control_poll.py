"""The control socket of a stage with a `PollLoop`; `control.call` is its client.

Never blocks: requests are read when they arrive, and a client that does not read its answer, stays idle or sends
a line that is too long is disconnected.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import InternalError, StarlingError
from pipeline.ipc.control import IDLE_S, MAX_CLIENTS, MAX_LINE, failed, is_ours, parse, socket_path
from pipeline.ipc.poll_loop import PollLoop
from pipeline.runtime import run_dir as rundir

log = logging.getLogger("starling.control")

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class PollControlServer:
    """`handler(request)` returns the answer's fields or raises `StarlingError`; it is called in the loop."""

    def __init__(self, run_dir: Path, loop: PollLoop, handler: Handler) -> None:
        """Bind. The stage holds its lock, so a file at the path is from a predecessor."""
        self.path = socket_path(run_dir, loop.stage)
        self._loop = loop
        self._handler = handler
        self._clients: dict[int, _Client] = {}
        rundir.clear_socket(f"ipc://{self.path}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self.path))
        os.chmod(self.path, 0o600)
        self._listener.listen(MAX_CLIENTS)
        loop.add_fd(self._listener.fileno(), self._accept)
        loop.on_tick.append(self._tick)

    def close(self) -> None:
        """Idempotent."""
        if self._listener.fileno() < 0:
            return
        for client in list(self._clients.values()):
            self._disconnect(client)
        self._loop.remove_fd(self._listener.fileno())
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # disconnected again
        if len(self._clients) >= MAX_CLIENTS or not is_ours(connection.fileno()):
            connection.close()
            return
        connection.setblocking(False)
        client = _Client(connection, self._loop.clock())
        self._clients[connection.fileno()] = client
        self._loop.add_fd(connection.fileno(), lambda: self._read(client))

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            client.received += data
            *lines, client.received = client.received.split(b"\n")
            for line in lines:
                answer = self._answer(line)
                client.last_line = self._loop.clock()
                if client.connection.send(answer) < len(answer):
                    data = b""
        except OSError:
            data = b""
        if not data or len(client.received) > MAX_LINE:
            self._disconnect(client)

    def _answer(self, line: bytes) -> bytes:
        try:
            answer = {"ok": True, **self._handler(parse(line))}
        except StarlingError as error:
            answer = failed(error)
        except Exception:
            log.exception("control request failed")
            answer = failed(InternalError("the stage failed to handle the request; see its log"))
        return json.dumps(answer).encode() + b"\n"

    def _tick(self) -> None:
        oldest = self._loop.clock() - IDLE_S
        for client in [client for client in self._clients.values() if client.last_line < oldest]:
            self._disconnect(client)

    def _disconnect(self, client: _Client) -> None:
        fd = client.connection.fileno()
        if self._clients.pop(fd, None) is not None:
            self._loop.remove_fd(fd)
            client.connection.close()


class _Client:
    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.received = b""  # of an incomplete line
        self.last_line = now  # when it arrived, s
