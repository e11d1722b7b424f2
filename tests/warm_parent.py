"""The process whose forks are the gateways of tests: `python -m tests.warm_parent FD` (tests/warm_programs.py).

It has imported what a gateway needs, as a gateway's supervisor has. A request comes with a socket, to which it sends
the pid, the pipe of stdout and stderr and a pidfd, and the exit code when the program has ended. It ends with its
client.
"""

from __future__ import annotations

import contextlib
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

MAX_REQUEST_BYTES = 1 << 20  # the environment of a program is most of it


def preload() -> None:
    """What `starling stage gateway` imports."""
    from starling.cli import stage

    stage.import_stage("gateway")
    gc.collect()
    gc.freeze()


def start(request: dict[str, Any]) -> ForkedProgram:
    command = ["starling", *request["arguments"]]
    assert can_fork(command)

    def main() -> None:
        from starling.cli import main

        sys.argv = command
        main()

    return ForkedProgram(command, main, request["env"], cwd=request["cwd"], is_piped=True, dies_with_parent=True)


def serve(requests: socket.socket) -> None:
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
                program = start(json.loads(message))
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
    preload()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
