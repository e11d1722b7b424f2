"""A group lives as a whole: rank 0 exits when one of its ranks ends; its parent gets a signal when one is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from pipeline.runtime.process import EXIT_FATAL

LONG_S = 60.0

LEADER = """
import os, signal
from stages.worker.ranks import Channel, Rank, watch
pids = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        signal.pause()
    pids.append(pid)
watch([Rank(pid, 0, os.pidfd_open(pid), Channel(0, 0)) for pid in pids])
print(*pids, flush=True)
signal.pause()
"""


@contextlib.contextmanager
def group() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a leader; yields it and the process ids of its ranks."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # as supervisors set it: BLAS threads would receive signals
    ) as leader:
        assert leader.stdout is not None
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        try:
            yield leader, pids
        finally:
            leader.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_rank_that_ends_ends_the_group() -> None:
    with group() as (leader, pids):
        os.kill(pids[1], signal.SIGKILL)
        assert leader.wait(LONG_S) == EXIT_FATAL
        assert leader.stderr is not None
        assert leader.stderr.readline() == f"rank process {pids[1]} has ended; the worker group ends with it\n"


def test_of_a_rank_that_is_stopped_the_parent_hears() -> None:
    # By a handler: a signal that is blocked here would go to any other thread, and be ignored there.
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signals.settimeout(LONG_S)
    handler = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    before = signal.set_wakeup_fd(wakeup.fileno())
    try:
        with group() as (leader, pids):
            os.kill(pids[0], signal.SIGSTOP)
            assert signals.recv(1) == bytes([signal.SIGCHLD])
            assert leader.poll() is None
            os.kill(pids[0], signal.SIGCONT)
            os.kill(pids[0], signal.SIGKILL)
            assert leader.wait(LONG_S) == EXIT_FATAL
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGCHLD, handler)
        signals.close()
        wakeup.close()
