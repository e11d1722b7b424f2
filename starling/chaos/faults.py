"""What can be done to a server on this machine, by its own records of who is who.

A fault returns what it did, in words.  None of them ends a process that is not the server's: processes
are named by (pid, start time) from the status records, and signalled through a pidfd.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.faults import points
from pipeline.faults.plan import install
from pipeline.observe.status import read_all
from shm.arena import ArenaError, process_ticks
from shm.pages import HEADER, PAGE_FULL, attach_kv

Fault = Callable[[], str]


class NothingToDoError(RuntimeError):
    """The fault has no target just now."""


def children(pid: int) -> list[int]:
    """Live children of a process, oldest first."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        found = [
            int(child)
            for thread in threads
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        ]
    except OSError:
        return []
    return sorted(found)


def processes(config: Config) -> dict[str, tuple[int, int]]:
    """Targets by name: every stage, and the ranks beyond 0 as `worker:MODEL/RANK`. (pid, ticks)."""
    found: dict[str, tuple[int, int]] = {}
    for record in read_all(paths.run_dir(config)):
        if not record.alive:
            continue
        found[record.stage] = (record.pid, record.ticks)
        if record.stage.startswith("worker"):
            for rank, child in enumerate(children(record.pid), 1):
                found[f"{record.stage}/{rank}"] = (child, process_ticks(child))
    return found


def send(config: Config, name: str, number: signal.Signals) -> str:
    """Signal one process. Raises `NothingToDoError` when it is not there."""
    pid, ticks = processes(config).get(name, (0, 0))
    try:
        pidfd = os.pidfd_open(pid) if pid else -1
    except ProcessLookupError:
        pidfd = -1
    if pidfd < 0:
        raise NothingToDoError(f"{name} is not running")
    try:
        if process_ticks(pid) != ticks:
            raise NothingToDoError(f"{name} has just ended")
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        raise NothingToDoError(f"{name} has just ended") from None
    finally:
        os.close(pidfd)
    return f"{number.name} {name} ({pid})"


def flip_bit(config: Config, chance: random.Random) -> str:
    """Change one bit of one cached page in a KV arena: full, and held by nobody."""
    arenas = sorted(paths.arena_dir(config).glob("*.kv"))
    chance.shuffle(arenas)
    for path in arenas:
        try:
            arena, views, _ = attach_kv(path)
        except (OSError, ArenaError):
            continue
        try:
            fields = views.headers.view(HEADER)[:, 0]
            idle = np.flatnonzero((fields["state"] == PAGE_FULL) & (fields["refs"] == 0)).tolist()
            if idle:
                page, at = chance.choice(idle), chance.randrange(views.pages.shape[1])
                views.pages[page, at] ^= 1 << chance.randrange(8)
                return f"flipped a bit of page {page}, byte {at}, in {path.name}"
        finally:
            del views
            arena.close()
    raise NothingToDoError("no cached page is idle")


# ------------------------------------------------------------------ disks


class FullDisk:
    """No file of the server can grow or be written: the kernel refuses it (RLIMIT_FSIZE 0, EFBIG).

    What is mapped already stays as it is; logs, journal, spill, sessions, records and metrics all fail. The end of
    this process, whatever it is of, ends it too (full_disk.py).
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._keeper: subprocess.Popen[str] | None = None

    def begin(self) -> str:
        # The supervisors, too: what starts meanwhile has no disk either.
        records = [record for record in read_all(paths.run_dir(self._config)) if record.alive]
        pids = {pid for record in records for pid in (*procfs.process_tree(record.pid), record.parent) if pid > 1}
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "starling.chaos.disk_blocker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us
        )
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        print(*(f"{pid}:{process_ticks(pid)}" for pid in sorted(pids)), file=self._keeper.stdin, flush=True)
        count = int(self._keeper.stdout.readline() or 0)
        if not count:
            self.end()
            raise NothingToDoError("no process lets its limits be changed")
        return f"disk full for {count} processes"

    def end(self) -> None:
        if self._keeper is not None:
            self._keeper.communicate()
            self._keeper = None


class SlowDisk:
    """Every write and read of the server's files takes its time, by a fault plan that the live stages follow."""

    POINTS = ("spill", "saved", "sessions", "spill_read", "saved_read", "journal_sync")

    def __init__(self, config: Config, delay_ms: int) -> None:
        self._path = paths.run_dir(config) / points.FILE
        self._delay_ms = delay_ms

    def begin(self) -> str:
        install(self._path, ", ".join(f"disk:slow@{point}={self._delay_ms}" for point in self.POINTS))
        return f"disk slow by {self._delay_ms} ms an access"

    def end(self) -> None:
        self._path.unlink(missing_ok=True)


# ------------------------------------------------------------------ reloading

RELOAD_S = 120.0


def reload(model: str) -> str:
    """`starling reload MODEL`: the same file again, as a new version.

    Raises `NothingToDoError` where that cannot be: not enough memory for two of them, a file that is gone.
    """
    command = [sys.executable, "-m", "starling", "reload", model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RELOAD_S, check=False)
    except subprocess.TimeoutExpired:
        raise NothingToDoError(f"starling reload {model} is not over after {RELOAD_S:.0f} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NothingToDoError(f"starling reload {model} exits with {done.returncode}: {said[-1] if said else ''}")
    return f"reloaded {model}"
