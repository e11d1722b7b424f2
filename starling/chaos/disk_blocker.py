"""Who keeps processes from writing files, and lets them again: `python -m starling.chaos.disk_blocker`, for faults.py.

    stdin    a line: PID:TICKS of each process; then nothing, until its end
    stdout   a line: of how many the limit is 0 now (RLIMIT_FSIZE: what would grow or be written is refused, EFBIG)

A process of its own because the limits must be lifted whatever becomes of the command that wanted them: the end of
stdin is that command's end, also by SIGKILL.  Nothing else would give a server its disk back.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

from pipeline import procfs
from shm.arena import process_ticks

Limits = dict[tuple[int, int], tuple[int, int]]  # (pid, ticks): limits before


def take(processes: Iterable[tuple[int, int]]) -> Limits:
    """Of those that are there and let their limits be changed."""
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


def give_back(limited: Limits) -> None:
    """Whoever has been started meanwhile has inherited the limit from its supervisor."""
    limits = {pid: limit for (pid, ticks), limit in limited.items() if process_ticks(pid) == ticks}
    heirs = {child: limit for pid, limit in limits.items() for child in procfs.process_tree(pid)}
    for pid, limit in {**heirs, **limits}.items():
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        except (OSError, ValueError):
            continue


def main() -> None:
    named = [entry.split(":") for entry in sys.stdin.readline().split()]
    limited = take((int(pid), int(ticks)) for pid, ticks in named)
    try:
        print(len(limited), flush=True)
        sys.stdin.read()
    finally:
        give_back(limited)


if __name__ == "__main__":
    main()
