"""`starling down`: end the server of this home, whoever started it, and wait for its end."""

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
from starling.cli.durations import Seconds

TIMEOUT_S = 20.0
UP, HONCHO = "starling up", "honcho"


class Process(NamedTuple):
    """One to be ended; `fd` is its pidfd, so that its number cannot come to mean another one."""

    name: str
    pid: int
    fd: int


@click.command(epilog="Exit codes: 0 nothing runs any more (or nothing did); 1 something still runs after --timeout.")
@click.option("--timeout", type=Seconds(0.1), default=TIMEOUT_S, show_default=True, metavar="S")
def down(timeout: float) -> int:
    """End the running server, as SIGTERM does, and wait until it is over.

    Streams in flight get server.drain_timeout_ms to finish. Ends `starling up`; without it honcho;
    without that the supervisors, or the bare stages. (Under systemd: systemctl stop.)
    """
    config = load()
    run_dir = paths.run_dir(config)
    deadline = time.monotonic() + timeout
    everyone = opened(running(run_dir))
    if not everyone:
        click.echo("nothing is running")
        return 0
    try:
        # One signal each: a supervisor takes a second one for impatience.
        for process in everyone[:1] if everyone[0].name in (UP, HONCHO) else everyone:
            signal.pidfd_send_signal(process.fd, signal.SIGTERM)
        left = [process for process in everyone if not ended(process, deadline)]
    finally:
        for process in everyone:
            os.close(process.fd)
    holder = cleanup.sweep(run_dir, paths.arena_dir(config), wait_s=max(0.0, deadline - time.monotonic()))
    if left or holder:
        still = ", ".join(f"{process.name} (pid {process.pid})" for process in left) or holder
        click.echo(f"starling: after {timeout:g} s still running: {still}", err=True)
        return EXIT_FATAL
    click.echo("ended")
    return 0


def running(run_dir: Path) -> list[tuple[str, int]]:
    """Names and pids of what keeps this server alive: what ends all the others comes first."""
    found: list[tuple[str, int]] = []
    up = rundir.lock_holder(run_dir, "up")
    if up:
        found.append((UP, up))
    for record in status.read_all(run_dir):
        supervisor = top_of(supervisor_of(record))
        if supervisor and supervisor in [pid for _, pid in found]:
            continue  # a crew has several
        if supervisor:
            honcho = ancestors.honcho_above(supervisor)
            if honcho and (HONCHO, honcho) not in found:
                found.append((HONCHO, honcho))
            found.append((record.stage, supervisor))
        elif record.alive:
            found.append((record.stage, record.pid))
    # The gateway before other stages: it stops taking requests while they serve what is in flight.
    return sorted(found, key=lambda one: (one[0] != UP, one[0] != HONCHO, one[0] != "gateway"))


def supervisor_of(record: status.StageStatus) -> int:
    """The pid of the stage's `starling supervise`, 0 when there is none."""
    command = procfs.command(record.parent)
    # A record may have been left by a crash, and its parent's number be another process's by now.
    is_ours = "supervise" in command[1:5] and record.stage.partition("-")[0] in command
    return record.parent if is_ours else 0


def top_of(supervisor: int) -> int:
    """Of a supervisor of workers: the crew that it belongs to. 0 stays 0."""
    above = procfs.read_stat(supervisor)
    if above is None or "supervise" not in procfs.command(above.parent)[1:5]:
        return supervisor
    return above.parent


def opened(found: list[tuple[str, int]]) -> list[Process]:
    processes = []
    for name, pid in found:
        try:
            processes.append(Process(name, pid, os.pidfd_open(pid)))
        except ProcessLookupError:
            continue
    return processes


def ended(process: Process, deadline: float) -> bool:
    """Wait for its end until `deadline` (of the monotonic clock)."""
    return bool(select.select([process.fd], [], [], max(0.0, deadline - time.monotonic()))[0])
