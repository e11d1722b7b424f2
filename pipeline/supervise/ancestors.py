"""Watched ancestors: the processes whose death ends this one.

Light to import: the supervisor uses it before anything that could start a thread.
"""

from __future__ import annotations

import os

from pipeline import procfs
from pipeline.runtime.process import PARENT_VARIABLE

# The last component of a program's path or of a module's dotted name.
HONCHO = ("honcho", "honcho_patch")
_MAX_ANCESTORS = 16  # bound of the walk towards init


def watched_ancestors(pid: int) -> list[int]:
    """Pids, nearest first.

    Under honcho these are all ancestors up to honcho itself: it starts commands from a process of its
    own and through a shell, and both survive it.  Otherwise the parent and, if that is a shell that only
    runs this command (`sh -c ...`), the shell's parent.
    """
    chain: list[tuple[int, list[str]]] = []
    stat = procfs.read_stat(pid)
    while stat is not None and stat.parent > 1 and len(chain) < _MAX_ANCESTORS:
        chain.append((stat.parent, procfs.command(stat.parent)))
        stat = procfs.read_stat(stat.parent)
    last = max((i for i, (_, command) in enumerate(chain) if _is_honcho(command)), default=-1)
    if last < 0:
        last = 1 if chain and _is_shell(chain[0][1]) else 0
    return [ancestor for ancestor, _ in chain[: last + 1]]


def honcho_above(pid: int) -> int:
    """Pid of the outermost honcho above the process; 0 when it runs without one."""
    return next((above for above in reversed(watched_ancestors(pid)) if _is_honcho(procfs.command(above))), 0)


def open_watched_ancestors() -> list[int]:
    """Descriptors that are readable when a watched ancestor of this process has ended.

    They are pidfds; ancestors that have just ended are left out.  If STARLING_PARENT_PID names another process than the
    parent of this one, it ended before it could be watched: one more descriptor is readable at once.
    """
    fds = [fd for fd in map(_open_pidfd, watched_ancestors(os.getpid())) if fd >= 0]
    if os.environ.pop(PARENT_VARIABLE, "") not in ("", str(os.getppid())):
        fds.append(os.eventfd(1, os.EFD_CLOEXEC))
    return fds


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _is_honcho(command: list[str]) -> bool:
    return any(os.path.basename(word).rpartition(".")[2] in HONCHO for word in command[:3])


def _is_shell(command: list[str]) -> bool:
    return len(command) > 1 and os.path.basename(command[0]) in ("sh", "bash", "dash") and command[1] == "-c"
