"""The processes of the server by name, and signals to them.

A process is identified by (pid, start time) from the status records and is signalled through a pidfd, so that no
process of another program is hit.
"""

from __future__ import annotations

import os
import select
import signal

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.observe.status import read_all
from shm.arena import process_ticks

END_S = 10.0  # at most, until a process that was sent a signal has ended


class NoTargetError(RuntimeError):
    """The fault has no target at present."""


def find_processes(config: Config) -> dict[str, tuple[int, int]]:
    """(pid, start time in ticks) of every stage by its name; ranks beyond 0 as `worker-MODEL/RANK`."""
    found: dict[str, tuple[int, int]] = {}
    for record in read_all(paths.run_dir(config)):
        if not record.alive:
            continue
        found[record.stage] = (record.pid, record.ticks)
        if record.stage.startswith("worker"):
            for rank, child in enumerate(procfs.children(record.pid), 1):
                found[f"{record.stage}/{rank}"] = (child, process_ticks(child))
    return found


def send_signal(config: Config, name: str, number: signal.Signals) -> str:
    """Send a signal to one process and wait for its end. Returns a description.

    A supervisor kills what is stopped a moment later; before that the server may still look ready.  Raises
    `NoTargetError` if the process does not run.
    """
    pid, ticks = find_processes(config).get(name, (0, 0))
    try:
        pidfd = os.pidfd_open(pid) if pid else -1
    except ProcessLookupError:
        pidfd = -1
    if pidfd < 0:
        raise NoTargetError(f"{name} is not running")
    try:
        if process_ticks(pid) != ticks:
            raise NoTargetError(f"{name} has just ended")
        signal.pidfd_send_signal(pidfd, number)
        end = select.poll()
        end.register(pidfd, select.POLLIN)
        end.poll(1000 * END_S)
    except ProcessLookupError:
        raise NoTargetError(f"{name} has just ended") from None
    finally:
        os.close(pidfd)
    return f"{number.name} {name} ({pid})"
