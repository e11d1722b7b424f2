"""What processes use, read from /proc: CPU time and memory of a stage with all that it has started.

Import-light; a process that is gone counts as nothing.
"""

from __future__ import annotations

import os

from pipeline.supervise import procfs

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """`pid` and everything below it (ranks of a worker); dead ones that nobody has waited for included."""
    found = [pid]
    for member in found:  # grows while it is walked
        found += procfs.children(member)
    return found


def cpu_s(pid: int) -> float:
    """CPU time of one process in seconds, user and system, of all its threads."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory_bytes(pid: int) -> int:
    """Proportional set size: a page that several processes map counts by its share in each.

    Where the kernel does not tell, the resident set, shared pages in full.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as f:
            for line in f:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return resident_bytes(pid)


def resident_bytes(pid: int) -> int:
    """Resident set size, pages that are shared with others in full."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
