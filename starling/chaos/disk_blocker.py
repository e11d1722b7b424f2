"""Stops processes from writing files until its stdin ends: `python -m starling.chaos.disk_blocker`, for disks.py.

    stdin    one line: PID:TICKS (start time) of each process; then end of file
    stdout   one line: the number of processes that were limited (RLIMIT_FSIZE 0: the kernel refuses writes, EFBIG)

This is a separate process because the limits must be lifted even if `starling chaos` is killed: then its end of the
pipe closes, and this process lifts them.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

from pipeline import procfs
from shm.arena import process_ticks

Limits = dict[tuple[int, int], tuple[int, int]]  # (pid, ticks): limits before


def limit(processes: Iterable[tuple[int, int]]) -> Limits:
    """Set the limit to 0 and return the former limits. Skips processes that have ended or cannot be changed."""
    limited: Limits = {}
    for pid, ticks in processes:
        if process_ticks(pid) != ticks:
            continue
        try:
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        except (OSError, ValueError):
            continue
        limited[pid, ticks] = soft, hard
    return limited


def restore(limited: Limits) -> None:
    """Restore the limits, also of processes that were started meanwhile and inherited 0 from their supervisor."""
    limits = {pid: limit for (pid, ticks), limit in limited.items() if process_ticks(pid) == ticks}
    inherited = {child: limit for pid, limit in limits.items() for child in procfs.process_tree(pid)}
    for pid, limit in {**inherited, **limits}.items():
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        except (OSError, ValueError):
            continue


def main() -> None:
    """Limit the processes on stdin and restore their limits at its end."""
    named = [entry.split(":") for entry in sys.stdin.readline().split()]
    limited = limit((int(pid), int(ticks)) for pid, ticks in named)
    try:
        print(len(limited), flush=True)
        sys.stdin.read()
    finally:
        restore(limited)


if __name__ == "__main__":
    main()
