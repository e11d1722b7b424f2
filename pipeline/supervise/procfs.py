"""Who descends from whom, read from /proc: whose death ends us, and whom we must take along.

Import-light: the supervisor uses it before anything that could start a thread.
"""

from __future__ import annotations

import os
from typing import NamedTuple

HONCHO = ("honcho", "starling.cli.honcho_patch")  # what it is called; what `starling up` starts
_DEEPEST = 16  # ancestors looked at


class Process(NamedTuple):
    """One line of /proc/PID/stat."""

    pid: int
    state: str  # R, S, D, Z (dead, not waited for), T (stopped), t (traced), ...
    parent: int


def look(pid: int) -> Process | None:
    """None when it is gone."""
    try:
        fields = _read(f"/proc/{pid}/stat").rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return Process(pid, fields[0].decode(), int(fields[1]))


def _read(path: str) -> bytes:
    """Supervisors read a few of these every second: a third of what `open` costs."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(fd, 65536)]
        while parts[-1]:
            parts.append(os.read(fd, 65536))
        return b"".join(parts)
    finally:
        os.close(fd)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP; not one that is traced (a debugger, a profiler)."""
    process = look(pid)
    return process is not None and process.state == "T"


def wants_to_run(pid: int) -> bool:
    """It waits for nothing but a core, or the disk."""
    process = look(pid)
    return process is not None and process.state in "RD"


def children(pid: int) -> list[int]:
    """Direct children, dead ones that nobody has waited for included."""
    try:
        found: list[int] = []
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
        return found
    except FileNotFoundError:
        if not os.path.exists(f"/proc/{pid}"):
            return []
    except OSError:
        return []
    # A kernel without CONFIG_PROC_CHILDREN: ask everybody.
    everyone = (look(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process.pid for process in everyone if process is not None and process.parent == pid]


class Below(NamedTuple):
    """What descends from a process."""

    are_any: bool
    stopped: int  # a process that is stopped (SIGSTOP); 0: there is none


def below(pid: int) -> Below:
    """Only the parent hears of a stop through waitid, and a parent that waits at a barrier for the stopped one
    hears nothing.  A traced process (a debugger, a profiler) does not count as stopped.
    """
    unseen = children(pid)
    are_any = bool(unseen)
    while unseen:
        process = look(unseen.pop())
        if process is None:
            continue
        if process.state == "T":
            return Below(are_any, process.pid)
        unseen += children(process.pid)
    return Below(are_any, 0)


def guardians(pid: int) -> list[int]:
    """Ancestors whose death ends this process: nearest first.

    Under honcho that is everything up to honcho itself: it starts commands from a process of its
    own, through a shell, and both survive it.  Otherwise the parent, and what is behind it if that is
    a shell that only runs us (`sh -c ...`).
    """
    chain: list[tuple[int, list[str]]] = []
    process = look(pid)
    while process is not None and process.parent > 1 and len(chain) < _DEEPEST:
        chain.append((process.parent, command(process.parent)))
        process = look(process.parent)
    last = max((i for i, (_, command) in enumerate(chain) if _is_honcho(command)), default=-1)
    if last < 0:
        last = 1 if chain and _is_shell(chain[0][1]) else 0
    return [ancestor for ancestor, _ in chain[: last + 1]]


def honcho_of(pid: int) -> int:
    """The outermost honcho above the process, 0 when it runs without one."""
    return next((above for above in reversed(guardians(pid)) if _is_honcho(command(above))), 0)


def command(pid: int) -> list[str]:
    """Its program and arguments; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return os.fsdecode(f.read(65536)).split("\0")
    except OSError:
        return []


def _is_honcho(command: list[str]) -> bool:
    return any(os.path.basename(word) in HONCHO for word in command[:3])


def _is_shell(command: list[str]) -> bool:
    return len(command) > 1 and os.path.basename(command[0]) in ("sh", "bash", "dash") and command[1] == "-c"
