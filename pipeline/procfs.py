"""Readers of /proc: parents and children, process states, CPU time, memory, open files.

Light to import: the supervisor uses it before anything that could start a thread.  A process that has
ended counts as absent or as zero.  Start times: `shm.arena.process_ticks`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
NO_LIMIT_BYTES = 1 << 62

_READ_BYTES = 65_536


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that are used here."""

    pid: int
    state: str  # R, S, D, Z (dead, not waited for), T (stopped), t (traced), ...
    parent: int
    cpu_s: float  # user and system time of all threads


class Descendants(NamedTuple):
    """Summary of the processes below one process."""

    exist: bool
    stopped: int  # pid of one that is stopped (SIGSTOP); 0: none is


def _read(path: str) -> bytes:
    """The whole file. Supervisors read several of these per second; this costs a third of what `open` does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(fd, _READ_BYTES)]
        while parts[-1]:
            parts.append(os.read(fd, _READ_BYTES))
        return b"".join(parts)
    finally:
        os.close(fd)


# ------------------------------------------------------------------ processes


def exists(pid: int) -> bool:
    """Whether the process exists, waited for or not."""
    return os.path.exists(f"/proc/{pid}")


def read_stat(pid: int) -> ProcessStat | None:
    """None when the process has ended and been waited for."""
    try:
        fields = _read(f"/proc/{pid}/stat").rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S)


def started_at(pid: int) -> float | None:
    """When the process started, s since 1970; None when it has ended."""
    try:
        ticks = int(_read(f"/proc/{pid}/stat").rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS_PER_S)


def is_stopped(pid: int) -> bool:
    """Stopped by SIGSTOP. A traced process (debugger, profiler) does not count."""
    stat = read_stat(pid)
    return stat is not None and stat.state == "T"


def is_runnable(pid: int) -> bool:
    """Running, or waiting only for a core or for the disk."""
    stat = read_stat(pid)
    return stat is not None and stat.state in "RD"


def command(pid: int) -> list[str]:
    """Program and arguments; empty when the process has ended."""
    try:
        return os.fsdecode(_read(f"/proc/{pid}/cmdline")).split("\0")
    except OSError:
        return []


def threads(pid: int | str = "self") -> list[int]:
    """Thread ids. Raises `OSError` when the process has ended."""
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def open_fds(pid: int | str = "self") -> int:
    """Number of open descriptors, the one that reads the directory excluded. Raises `OSError`."""
    return len(os.listdir(f"/proc/{pid}/fd")) - (pid in ("self", os.getpid()))


# ------------------------------------------------------------------ descent


def children(pid: int) -> list[int]:
    """Direct children, zombies included."""
    try:
        found: list[int] = []
        for thread in threads(pid):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
        return found
    except FileNotFoundError:
        if not exists(pid):
            return []
    except OSError:
        return []
    # A kernel without CONFIG_PROC_CHILDREN: read the parent of every process.
    everything = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat.pid for stat in everything if stat is not None and stat.parent == pid]


def ancestors(pid: int, count: int) -> list[int]:
    """The parent, its parent and so on, at most `count`, without the system's first process."""
    found: list[int] = []
    while len(found) < count and (stat := read_stat(found[-1] if found else pid)) is not None and stat.parent > 1:
        found.append(stat.parent)
    return found


def process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants (the ranks of a worker), zombies included."""
    found = [pid]
    for member in found:  # grows during the walk
        found += children(member)
    return found


def descendants(pid: int) -> Descendants:
    """Whether `pid` has descendants, and whether one of them is stopped.

    `waitid` reports a stop only to the direct parent, and a parent that waits at a barrier for the stopped
    process does not act on it.
    """
    unseen = children(pid)
    exist = bool(unseen)
    while unseen:
        stat = read_stat(unseen.pop())
        if stat is None:
            continue
        if stat.state == "T":
            return Descendants(exist, stat.pid)
        unseen += children(stat.pid)
    return Descendants(exist, 0)


# ------------------------------------------------------------------ CPU time and memory


def cpu_s(pid: int) -> float:
    """CPU time of one process in seconds, user and system, all threads; 0.0 when it has ended."""
    stat = read_stat(pid)
    return stat.cpu_s if stat is not None else 0.0


class CoreWaits:
    """How long the thread that makes this, and the main thread, have been ready to run and had no core.

    A main thread without a core may hold the interpreter's lock, which the other one waits for.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        for thread in {os.getpid(), threading.get_native_id()}:
            with contextlib.suppress(OSError):  # the kernel does not count it, or there are too many descriptors
                self._fds.append(os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC))

    def __call__(self) -> float:
        """Seconds so far, for differences; 0.0 if that is not known. It takes microseconds."""
        try:
            return sum(int(os.pread(fd, 64, 0).split()[1]) for fd in self._fds) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        """Idempotent."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def memory_bytes(pid: int) -> int:
    """Proportional set size: a page that n processes map counts 1/n in each.

    The resident set size where the kernel does not provide it.
    """
    try:
        for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return resident_bytes(pid)


def resident_bytes(pid: int | str = "self") -> int:
    """Resident set size, shared pages in full; 0 when the process has ended."""
    return _statm(pid)[0]


def anonymous_bytes(pid: int | str = "self") -> int:
    """Resident memory that no file backs (heaps, stacks); 0 when the process has ended."""
    resident, shared = _statm(pid)
    return resident - shared


def resident_and_anonymous_bytes(pid: int | str = "self") -> tuple[int, int]:
    """`resident_bytes` and `anonymous_bytes`, in one look."""
    resident, shared = _statm(pid)
    return resident, resident - shared


def disk_bytes(pid: int | str = "self") -> tuple[int, int]:
    """Bytes that the process has read from disks and written to them; zeros when it has ended, or must not be read."""
    found = {b"read_bytes": 0, b"write_bytes": 0}
    try:
        for line in _read(f"/proc/{pid}/io").splitlines():
            name, _, value = line.partition(b":")
            if name in found:
                found[name] = int(value)
    except (OSError, ValueError):
        pass
    return found[b"read_bytes"], found[b"write_bytes"]


def _statm(pid: int | str) -> tuple[int, int]:
    """(resident, shared) bytes."""
    try:
        _, resident, shared, *_ = _read(f"/proc/{pid}/statm").split()
    except (OSError, ValueError):
        return 0, 0
    return int(resident) * PAGE_BYTES, int(shared) * PAGE_BYTES


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable in bytes; `NO_LIMIT_BYTES` where it cannot be read."""
    return _memory("MemAvailable:", meminfo)


def total_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemTotal in bytes; `NO_LIMIT_BYTES` where it cannot be read."""
    return _memory("MemTotal:", meminfo)


def _memory(name: str, meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return NO_LIMIT_BYTES
