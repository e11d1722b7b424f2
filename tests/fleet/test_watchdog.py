"""Agents and orchestrators send keepalives to systemd from their event loop: none come while it hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.server import ROOT, START_S
from tests.fleet.agent_process import MAIN, SPARING

INTERVAL_S = 0.1
# Python's handlers run in the main thread, which has the event loop. SIGUSR2 ends the block.
BLOCKS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
def block(number, frame):
    os.write(1, b"blocked\\n")
    signal.sigwait({signal.SIGUSR2})
signal.signal(signal.SIGUSR1, block)
"""


@contextmanager
def started(command: str, home: Path, address: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"},
        **SPARING,
        "STARLING_HOME": str(home),
        "STARLING_FLEET__BLOBS": str(home / "blobs"),
        "PYTHONPATH": str(ROOT),
        "NOTIFY_SOCKET": str(address),
        "WATCHDOG_USEC": str(int(2e6 * INTERVAL_S)),
    }
    program = [sys.executable, "-c", BLOCKS + MAIN, command, "--port", "0"]
    process = subprocess.Popen(program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        with process:
            yield process
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["agent", "orchestrator"])
def test_a_loop_that_hangs_sends_no_keepalives(command: str, tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(START_S)
        with started(command, tmp_path, address) as process:
            assert process.stdout is not None
            received = {systemd.recv(100)}
            while {one.partition(b"\n")[0] for one in received} != {b"READY=1", b"WATCHDOG=1"}:
                received.add(systemd.recv(100))
            assert any(b"\nSTATUS=agent " in one for one in received) == (command == "agent")
            assert systemd.recv(100) == b"WATCHDOG=1", "they go on"

            process.send_signal(signal.SIGUSR1)
            while b"blocked" not in process.stdout.readline():
                assert process.poll() is None
            systemd.setblocking(False)
            with suppress(BlockingIOError):
                while True:  # what was sent before
                    systemd.recv(100)
            systemd.settimeout(10 * INTERVAL_S)
            with pytest.raises(TimeoutError):
                systemd.recv(100)

            systemd.settimeout(START_S)
            process.send_signal(signal.SIGUSR2)
            assert systemd.recv(100) == b"WATCHDOG=1"
            process.terminate()
            assert process.wait(START_S) == 0
