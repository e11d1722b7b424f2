"""The process whose forks are gateways, orchestrators and servers of tests: `python -m tests.warm_parent FD PADDING`.

tests/warm_programs.py is its client. It imports what a program needs before the first one of its kind, as the
processes do that fork the real ones. A request comes with a socket, to which it sends the pid, the pipe of stdout and
stderr and a pidfd, and the exit code when the program has ended. It ends with its client.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

from starling.cli.forked_program import ForkedProgram, can_fork
from tests.warm_programs import OWN_HOME

MAX_REQUEST_BYTES = 1 << 20  # the environment of a program is most of it


class ShownHome:
    """STARLING_HOME as /proc/PID/environ shows it, by which tests find the processes of a server.

    That is the memory in which this process got its environment. Its forks have it, too.
    """

    NAME = "STARLING_HOME"

    def __init__(self) -> None:
        """Takes the value that this process was started with, which is longer than any path, from `os.environ`."""
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        self._address = libc.getenv(self.NAME.encode())
        self._nbytes = len(os.environ.pop(self.NAME))

    def show(self, home: str) -> None:
        """In a fork."""
        value = os.fsencode(home)
        assert len(value) < self._nbytes, home
        ctypes.memmove(self._address, value.ljust(self._nbytes, b"\0"), self._nbytes)


@functools.cache
def preload(command: str) -> None:
    """What `starling stage gateway`, `starling orchestrator` or `honcho start` imports, with all stages."""
    from starling.cli import stage

    stage.import_stage("gateway")  # the first import of aiohttp, without certificates
    if command == "orchestrator":
        from stages.orchestrator import stage as orchestrator  # noqa: F401
        from starling import orchestrator_pages  # noqa: F401
        from starling.cli import orchestrator as cli  # noqa: F401
    elif command == "honcho":
        from starling.cli import honcho_patch  # noqa: F401

        for name in stage.STAGES:
            stage.import_stage(name)
    gc.collect()
    gc.freeze()


def start(request: dict[str, Any], home: ShownHome) -> ForkedProgram:
    program, *arguments = command = request["command"]
    preload("honcho" if program == "honcho" else arguments[0])
    assert can_fork(command)
    # What the fork inherits is never collected there: it would close descriptors whose numbers are others' by then.
    gc.collect()
    gc.freeze()

    def main() -> None:
        if (given := os.environ.get(ShownHome.NAME)) is not None:
            home.show(given)
        sys.argv = command
        if program == "honcho":
            from starling.cli.honcho_patch import main
        else:
            from starling.cli import main
        main()

    return ForkedProgram(
        command,
        main,
        request["env"],
        cwd=request["cwd"],
        is_piped=True,
        leads_session=request["leads_session"],
        dies_with_parent=True,
    )


def serve(requests: socket.socket, home: ShownHome) -> None:
    running: dict[int, tuple[ForkedProgram, socket.socket]] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                poll.unregister(fd)
                program, client = running.pop(fd)
                os.close(fd)
                with client, contextlib.suppress(OSError):  # a test that gave up does not wait for the end
                    client.send(str(program.wait()).encode())
                continue
            message, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 1)
            if not message:
                return
            client = socket.socket(fileno=fds[0])
            try:
                program = start(json.loads(message), home)
            except Exception:  # fails the test that asked, not those whose programs run
                traceback.print_exc()
                client.close()
                continue
            pidfd = os.pidfd_open(program.pid)
            with program.stdout as output:
                try:
                    socket.send_fds(client, [str(program.pid).encode()], [output.fileno(), pidfd])
                except OSError:
                    os.kill(program.pid, signal.SIGKILL)  # reaped as every other program
            running[pidfd] = (program, client)
            poll.register(pidfd, select.POLLIN)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and with them this process
    shown = ShownHome()
    if (own := os.environ.pop(OWN_HOME, None)) is not None:
        os.environ[ShownHome.NAME] = own
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection, shown)
