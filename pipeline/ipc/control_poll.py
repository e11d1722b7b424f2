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


class Later:
    """The answer to a request that comes later: a handler returns it, and calls `finish` in the loop."""

    def __init__(self) -> None:
        self._send: Callable[[dict[str, Any] | StarlingError], object] | None = None
        self._result: dict[str, Any] | StarlingError | None = None

    def finish(self, result: dict[str, Any] | StarlingError) -> None:
        """The answer's fields, or the error. A client that has left gets nothing."""
        if self._send is not None:
            self._send(result)
        else:
            self._result = result

    def then(self, send: Callable[[dict[str, Any] | StarlingError], object]) -> None:
        """The server's part: `send` the answer."""
        if self._result is not None:
            send(self._result)
        else:
            self._send = send


Handler = Callable[[dict[str, Any]], dict[str, Any] | Later]


class PollControlServer:
    """`handler(request)` returns the answer's fields or a `Later`, or raises `StarlingError`; called in the loop."""

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
                client.last_line = self._loop.clock()
                answer = self._answer(line)
                if isinstance(answer, Later):
                    answer.then(lambda result: self._send_later(client, result))
                elif client.connection.send(answer) < len(answer):
                    data = b""
        except OSError:
            data = b""
        if not data or len(client.received) > MAX_LINE:
            self._disconnect(client)

    def _send_later(self, client: _Client, result: dict[str, Any] | StarlingError) -> None:
        if self._clients.get(client.connection.fileno()) is not client:
            return  # it has left
        answer = _encoded(failed(result) if isinstance(result, StarlingError) else {"ok": True, **result})
        try:
            is_sent = client.connection.send(answer) == len(answer)
        except OSError:
            is_sent = False
        if not is_sent:
            self._disconnect(client)

    def _answer(self, line: bytes) -> bytes | Later:
        try:
            found = self._handler(parse(line))
            if isinstance(found, Later):
                return found
            answer = {"ok": True, **found}
        except StarlingError as error:
            answer = failed(error)
        except Exception:
            log.exception("control request failed")
            answer = failed(InternalError("the stage failed to handle the request; see its log"))
        return _encoded(answer)

    def _tick(self) -> None:
        oldest = self._loop.clock() - IDLE_S
        for client in [client for client in self._clients.values() if client.last_line < oldest]:
            self._disconnect(client)

    def _disconnect(self, client: _Client) -> None:
        fd = client.connection.fileno()
        if self._clients.pop(fd, None) is not None:
            self._loop.remove_fd(fd)
            client.connection.close()


def _encoded(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


class _Client:
    def __init__(self, connection: socket.socket, now: float) -> None:
        self.connection = connection
        self.received = b""  # of an incomplete line
        self.last_line = now  # when it arrived, s
