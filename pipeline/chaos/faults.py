"""What can be done to a server on this machine, by its own records of who is who.

A fault returns what it did, in words.  None of them ends a process that is not the server's: processes
are named by (pid, start time) from the status records, and signalled through a pidfd.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeline import paths
from pipeline.config_schema import Config
from pipeline.status import read_all
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
