"""Linux calls for supervised processes: parent death, keepalives, systemd notification, scheduling, watches.

Thin wrappers, light to import; they know nothing of the work of stages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

EXIT_OK = 0
EXIT_FATAL = 1  # an error that a restart may cure
EXIT_USAGE = 2  # invalid arguments of a command; click's own code
EXIT_CONFIG = 78  # EX_CONFIG: a restart cannot help; the supervisor gives up at once
EXIT_ORPHANED = 70  # the parent process has ended

MAX_FILES = 1 << 20  # descriptors that are looked for one by one, where they cannot be listed and the limit is higher

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

KEEPALIVE_FD_VARIABLE = "STARLING_KEEPALIVE_FD"
PARENT_VARIABLE = "STARLING_PARENT_PID"
ORPHANS_VARIABLE = "STARLING_KILL_ORPHANS"  # set: stages whose server was killed end at once, without draining
AWAITED_VARIABLE = "STARLING_AWAITED"  # set: requests wait for the models of the server
_KEEPALIVE = struct.Struct("<I?3x")  # its size is a power of two, so no read of 4096 bytes splits a record

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_SCHED_SETATTR = 314  # x86-64
_SCHED_ATTR_BYTES = 56
SLICE_NS = 100_000  # the kernel's minimum
_SIGSET_BYTES = 128
_STDERR = 2  # its descriptor
_IN_ATTRIB, _IN_MOVED_TO = 0x4, 0x80


# The longest wait of a `poll` that a signal is to end. A handler of Python's runs between two instructions: that of a
# signal which comes after the last of them, just before the system call, runs when the call returns.
LOST_SIGNAL_S = 5.0

STOP_S = 30.0  # from the end of the drain time to the end of a service, for systemd

_epoch_ns = 0


def process_epoch() -> int:
    """Start of this process as its peers see it: ns since 1970, fixed at the first call, new after a fork."""
    global _epoch_ns
    if not _epoch_ns:
        _epoch_ns = time.time_ns()
    return _epoch_ns


def _reset_epoch() -> None:
    global _epoch_ns
    _epoch_ns = 0


os.register_at_fork(after_in_child=_reset_epoch)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent_pid: int | None = None) -> None:
    """Request SIGKILL at the parent's death: the first call of a stage's process.

    The kernel watches the *thread* that forked: fork from a main thread.  `parent_pid` (by argument or
    STARLING_PARENT_PID) closes the gap before this call: if that parent has ended already, this process exits.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    given = os.environ.pop(PARENT_VARIABLE, "")
    if parent_pid is None and given.isdigit():
        parent_pid = int(given)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def _arguments() -> tuple[int, int]:
    """Where this process's arguments begin and end in its memory (arg_start, arg_end of /proc/self/stat)."""
    fields = Path("/proc/self/stat").read_bytes().rsplit(b")", 1)[1].split()
    return int(fields[45]), int(fields[46])


def fits_command(command: list[str]) -> bool:
    """Whether `set_command` shows all of `command`."""
    begin, end = _arguments()
    return command_bytes(command) <= end - begin


def command_bytes(command: list[str]) -> int:
    """How much memory the arguments of a process take."""
    return sum(len(os.fsencode(word)) + 1 for word in command)


def set_command(command: list[str]) -> None:
    """Let `ps` and /proc/PID/cmdline show `command` for this process: after a fork it still shows the parent's.

    The words overwrite the memory of the original arguments, and are cut to its size.
    """
    begin, end = _arguments()
    if begin < end:
        words = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
        ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


def watch_parent() -> int:
    """A pidfd of the parent, readable when it has ended; -1 when it cannot be watched."""
    try:
        return os.pidfd_open(os.getppid())
    except OSError:  # in another pid namespace, or just ended
        return -1


def use_default_time_slice() -> bool:
    """Undo `use_short_time_slice` for this thread: of a rank, whose steps others interrupt. False where refused."""
    return use_short_time_slice(0)


def use_short_time_slice(slice_ns: int = SLICE_NS) -> bool:
    """Request a short time slice, so that this thread, and those that it starts, run soon after waking.

    Ranks spin on every core.  With the default slice a woken stage may wait for milliseconds until a rank has
    used up its slice; with a short one it preempts the rank (Linux 6.12 and later; older kernels ignore it).  Its
    share of CPU time stays the same.  False where the kernel refuses, and under another policy (`chrt`), which stays.
    """
    if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        return False
    # struct sched_attr: size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period, clamps
    fields = struct.pack("=IIQiIQQQII", _SCHED_ATTR_BYTES, 0, 0, os.nice(0), 0, slice_ns, 0, 0, 0, 0)
    return int(_libc.syscall(_SYS_SCHED_SETATTR, 0, ctypes.create_string_buffer(fields, len(fields)), 0)) == 0


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one; every connection needs one. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some container runtimes refuse it: the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """How many files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def close_files(keep: int = -1) -> None:
    """Close all files above stderr but `keep`: for a fork that is to hold nothing of its parent.

    Their descriptors stay, as ones of /dev/null, or of stderr where no more files can be open.  Objects of the parent
    that this process still has, such as maps of files, close the number that they know when they end: by then it must
    not be another file's, such as an arena's.
    """
    found: Iterable[int]
    try:
        found = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # there are as many as there may be, or no /proc
        found = range(min(file_limit(), MAX_FILES))
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # a copy of one that stays open needs no room
        null = _STDERR
    for fd in found:
        if fd > _STDERR and fd not in (keep, null) and _is_open(fd):
            os.dup2(null, fd, inheritable=False)
    if null != _STDERR:
        os.close(null)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:  # it was that of the list
        return False
    return True


def open_child_signal_fd() -> int:
    """A descriptor that is readable when a child stops, continues or ends; read it before checking which one.

    Blocks SIGCHLD in this thread and in those that it starts.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signals = 1 << (signal.SIGCHLD - 1)
    mask = ctypes.create_string_buffer(signals.to_bytes(_SIGSET_BYTES, sys.byteorder), _SIGSET_BYTES)
    return _descriptor(_libc.signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC))


def open_rename_watch(directory: Path) -> int:
    """A descriptor that is readable when a file has been renamed into `directory`. Raises `OSError`."""
    return _open_watch(directory, _IN_MOVED_TO)


def open_touch_watch(path: Path) -> int:
    """A descriptor that is readable when the times of this file have been set; it is made if there is none.

    Unlike a watch of its directory, it is not readable when other files there change. Raises `OSError`.
    """
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return _open_watch(path, _IN_ATTRIB)


def open_removal_watch(path: Path) -> int:
    """A descriptor that is readable when a name of this file is removed, or its times, owner or mode have been set.

    Raises `OSError` if there is no such file, too.
    """
    return _open_watch(path, _IN_ATTRIB)


def _open_watch(path: Path, events: int) -> int:
    fd = _descriptor(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        _descriptor(_libc.inotify_add_watch(fd, os.fsencode(path), events))
    except OSError:
        os.close(fd)
        raise
    return fd


def _descriptor(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, which can then kill them and wait for them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def sd_notify(state: str) -> bool:
    """Notify systemd (`READY=1`, `WATCHDOG=1`, ...). False without NOTIFY_SOCKET; never blocks."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address[0] == "@":
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        notify.setblocking(False)
        try:
            notify.sendto(state.encode(), address)
        except OSError:
            return False
    return True


def notify_stopping(drain_s: float) -> None:
    """Notify systemd that the service finishes its work, for up to `drain_s` seconds; then it has STOP_S more to end.

    The limit of the unit (TimeoutStopSec) holds if it is longer: EXTEND_TIMEOUT_USEC never shortens it (sd_notify(3)).
    """
    sd_notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int((drain_s + STOP_S) * 1e6)}")


def watchdog_interval_s() -> float:
    """Seconds between two `WATCHDOG=1` (half of systemd's limit); 0.0 without a watchdog."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    except ValueError:
        return 0.0


def claim_keepalive_fd() -> int:
    """The write end of the supervisor's keepalive pipe; -1 without a supervisor.

    Removed from the environment, so that no child process mistakes another file for it.
    """
    try:
        fd = int(os.environ.pop(KEEPALIVE_FD_VARIABLE, "-1"))
        os.set_inheritable(fd, False)
    except (ValueError, OSError):
        return -1
    return fd


class KeepAlive(NamedTuple):
    """Message of a stage to its supervisor."""

    allowance_ms: int  # the supervisor kills the stage when the next one does not arrive within this time
    was_ready: bool  # the stage has been ready since it was started


def send_keepalive(fd: int, message: KeepAlive) -> None:
    """Never blocks or raises."""
    try:
        os.write(fd, _KEEPALIVE.pack(min(message.allowance_ms, 0xFFFFFFFF), message.was_ready))
    except OSError:  # full: the supervisor has unread ones; broken: the parent's pidfd reports its death
        pass


def read_keepalives(fd: int) -> KeepAlive | None:
    """The last message in the pipe; None when there is no new one."""
    last = None
    while True:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return last
        if len(data) < _KEEPALIVE.size:
            return last
        last = KeepAlive(*_KEEPALIVE.unpack_from(data, len(data) - len(data) % _KEEPALIVE.size - _KEEPALIVE.size))
        if len(data) < 4096:
            return last
