"""`starling down`: stop the server of this home and wait for its end, whatever command started it."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple

import click

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.observe import status
from pipeline.runtime import run_dir as rundir
from pipeline.runtime.process import EXIT_FATAL
from pipeline.supervise import ancestors, cleanup
from starling.cli import terminal
from starling.cli.options import exit_codes, timeout_option

TIMEOUT_S = 20.0
UP, HONCHO = "starling up", "honcho"


class Process(NamedTuple):
    """A process to stop. `fd` is its pidfd: unlike the pid, it cannot come to mean another process."""

    name: str
    pid: int
    fd: int


@click.command(epilog=exit_codes({0: "no process of the server runs", 1: "a process still runs after --timeout"}))
@timeout_option(TIMEOUT_S, "How long to wait for the end.", least_s=0.1)
def down(timeout: float) -> int:
    """Stop the running server and wait until it has ended.

    Streams in flight get server.drain_timeout_ms to finish. The command sends SIGTERM to `starling up`; if that does
    not run, to honcho; otherwise to the supervisors, or to stages without a supervisor. Under systemd use
    `systemctl stop` instead.
    """
    config = load()
    run_dir = paths.run_dir(config)
    deadline = time.monotonic() + timeout
    processes = opened(running(run_dir))
    if not processes:
        click.echo("nothing is running")
        return 0
    try:
        # One signal each: at a second one a supervisor kills its stage.
        for process in processes[:1] if processes[0].name in (UP, HONCHO) else processes:
            signal.pidfd_send_signal(process.fd, signal.SIGTERM)
        left = [process for process in processes if not ended(process, deadline)]
    finally:
        for process in processes:
            os.close(process.fd)
    holder = cleanup.sweep(run_dir, paths.arena_dir(config), wait_s=max(0.0, deadline - time.monotonic()))
    if left or holder:
        still = ", ".join(f"{process.name} (pid {process.pid})" for process in left) or holder
        terminal.complain(f"after {timeout:g} s still running: {still}")
        return EXIT_FATAL
    click.echo("ended")
    return 0


def running(run_dir: Path) -> list[tuple[str, int]]:
    """Names and pids of the processes that keep this server alive. The one whose end ends all others comes first."""
    found: list[tuple[str, int]] = []
    up = rundir.lock_holder(run_dir, "up")
    if up:
        found.append((UP, up))
    for record in status.read_all(run_dir):
        supervisor = top_of(supervisor_of(record))
        if supervisor and supervisor in [pid for _, pid in found]:
            continue  # a worker pool has several workers
        if supervisor:
            honcho = ancestors.honcho_above(supervisor)
            if honcho and (HONCHO, honcho) not in found:
                found.append((HONCHO, honcho))
            found.append((record.stage, supervisor))
        elif record.alive:
            found.append((record.stage, record.pid))
    # The gateway comes before the other stages: it refuses new requests while they finish those in flight.
    return sorted(found, key=lambda one: (one[0] != UP, one[0] != HONCHO, one[0] != "gateway"))


def supervisor_of(record: status.StageStatus) -> int:
    """The pid of the stage's `starling supervise`, 0 when there is none."""
    command = procfs.command(record.parent)
    # After a crash the record stays, and another process may have the parent's pid by now.
    is_ours = "supervise" in command[1:5] and record.stage.partition("-")[0] in command
    return record.parent if is_ours else 0


def top_of(supervisor: int) -> int:
    """The pid of the worker pool above a worker's supervisor; otherwise `supervisor` itself. 0 stays 0."""
    above = procfs.read_stat(supervisor)
    if above is None or "supervise" not in procfs.command(above.parent)[1:5]:
        return supervisor
    return above.parent


def opened(found: list[tuple[str, int]]) -> list[Process]:
    """A pidfd for each process that still runs."""
    processes = []
    for name, pid in found:
        try:
            processes.append(Process(name, pid, os.pidfd_open(pid)))
        except ProcessLookupError:
            continue
    return processes


def ended(process: Process, deadline: float) -> bool:
    """Wait until the process ends or `deadline` (monotonic clock, s) has passed; True if it has ended."""
    return bool(select.select([process.fd], [], [], max(0.0, deadline - time.monotonic()))[0])
