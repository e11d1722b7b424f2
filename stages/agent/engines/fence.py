"""The end of everything that an engine has left: what it held passes on only when no process of it lives.

The processes of an engine are those whose environment names its home, or the mark of the standby engine that has got
the home (MARK_FILE; standby.py); forks inherit it, whatever they are called.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import InternalError
from pipeline.files import replace_file
from pipeline.fleet.standby import MARK_FILE, MARK_VARIABLE
from pipeline.supervise import cleanup

PAUSE_S = 0.02
TIMEOUT_S = 30.0  # a killed process may still write its memory to the disk


def write_mark(home: Path, mark: str) -> None:
    """Store the mark of the process that gets `home`, before it gets it. Raises `OSError`."""
    replace_file(home / MARK_FILE, mark.encode())


def processes_of(home: Path) -> list[int]:
    """Pids of the living processes whose environment has STARLING_HOME = `home`, or the mark in it."""
    marks = _marks(home)
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and int(name) != os.getpid() and _has(int(name), marks)
    ]


def _marks(home: Path) -> set[bytes]:
    marks = {b"STARLING_HOME=" + os.fsencode(home)}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mark = (home / MARK_FILE).read_bytes()
        if re.fullmatch(rb"[0-9a-f]{32}", mark):
            marks.add(MARK_VARIABLE.encode() + b"=" + mark)
    return marks


def _has(pid: int, marks: set[bytes]) -> bool:
    try:
        return not marks.isdisjoint(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # ended, or another user's
        return False


def fence(
    home: Path,
    run_dir: Path,
    arena_dir: Path,
    *,
    timeout_s: float = TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Kill the processes of `home`, wait for their end, and remove their arenas; how many there were.

    Raises `InternalError` if one cannot be killed.
    """
    deadline = clock() + timeout_s
    killed: set[int] = set()
    while True:
        alive = processes_of(home)
        for pid in alive:
            if _kill(pid, home):
                killed.add(pid)
        holder = "" if alive else cleanup.sweep(run_dir, arena_dir)
        if not alive and not holder:
            return len(killed)
        if clock() >= deadline:
            left = f"processes {alive}" if alive else f"the lock of {holder}"
            raise InternalError(f"{home}: {left} outlived SIGKILL for {timeout_s:g} s; check the disk, or reboot")
        pause(PAUSE_S)


def _kill(pid: int, home: Path) -> bool:
    """SIGKILL a process by its pidfd, so that the pid cannot come to mean another one."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not _has(pid, _marks(home)):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    finally:
        os.close(fd)
