"""Gateways, orchestrators and servers that start at once: forks of a process that has imported them.

`starling up` forks supervisors, and supervisors their stages, in the same way.

    program = WarmProgram(["starling", "stage", "gateway"], env)  # as subprocess.Popen; stderr has stdout as well

The first use in a process of the tests starts the parent (tests/warm_parent.py), which ends with it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

START_S = 120.0  # until a fork has started, beside other work
# Room in the memory that /proc shows of the forks (`process.set_command`, `ShownHome`).
ROOM_OF_COMMAND, ROOM_OF_HOME = "-" * 512, "-" * 512
OWN_HOME = "WARM_PARENT_HOME"  # the parent's own STARLING_HOME, if it has one
ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def _parent(kind: str) -> socket.socket:
    """The connection to the parent of all programs of a kind, of which it has imported no other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.warm_parent", str(theirs.fileno()), ROOM_OF_COMMAND]
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot be forked
        if (home := env.get("STARLING_HOME")) is not None:
            env[OWN_HOME] = home
        env["STARLING_HOME"] = ROOM_OF_HOME
        process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # a fork of the tests still holds the connection
            process.kill()
            process.wait()

    atexit.register(end)
    return ours


class WarmProgram:
    """A running `starling ARGUMENTS` or `honcho start -f PROCFILE`.

    Threads may wait for different programs, not for the same one.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str | Path = "", *, leads_session: bool = False
    ) -> None:
        """`cwd`: "" is that of this process.  leads_session: it starts a session, else a process group."""
        self.returncode: int | None = None  # exit code, or -signal
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kind = command[0] if command[0] == "honcho" else command[1]
        with theirs:
            request = {
                "command": command,
                "env": dict(env),
                "cwd": str(cwd) or os.getcwd(),
                "leads_session": leads_session,
            }
            socket.send_fds(_parent(kind), [json.dumps(request).encode()], [theirs.fileno()])
        self._channel.settimeout(START_S)
        message, fds, _, _ = socket.recv_fds(self._channel, 64, 2)
        if not message:
            raise RuntimeError(f"{command} could not be started: its parent's output says why")
        output, self._pidfd = fds
        self.pid = int(message)
        self.stdout = self.stderr = os.fdopen(output)  # one pipe for both

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises `TimeoutError`."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            self.returncode = int(self._channel.recv(64))
            self._channel.close()
            os.close(self._pidfd)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except BlockingIOError:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it has just ended

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
