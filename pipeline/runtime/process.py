"""What a process of the pipeline does to live and die well: parent, descriptors, notifications.

Thin, import-light wrappers over Linux calls; knows nothing of stages' work.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

EXIT_OK = 0
EXIT_FATAL = 1  # an error that a restart may cure
EXIT_USAGE = 2  # of a command: a name or an option that cannot be; click's own
EXIT_CONFIG = 78  # EX_CONFIG: a restart cannot cure it; the supervisor gives up at once
EXIT_ORPHANED = 70  # the parent is gone

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

BEAT_FD_VARIABLE = "STARLING_BEAT_FD"
PARENT_VARIABLE = "STARLING_PARENT_PID"
_BEAT = struct.Struct("<I?3x")  # a power of two: a read never cuts one in half

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_SCHED_SETATTR = 314  # x86-64
_SCHED_ATTR_BYTES = 56
SLICE_NS = 100_000  # the least that the kernel takes
_SIGSET_BYTES = 128
_IN_MOVED_TO = 0x80


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
    """Arm SIGKILL at the parent's death: the first thing that a stage's process does.

    The kernel watches the *thread* that forked: fork from a main thread.  `parent_pid`, when the forker
    tells (by argument or STARLING_PARENT_PID), closes the gap before the call: a parent that is gone
    already ends this process at once.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    told = os.environ.pop(PARENT_VARIABLE, "")
    if parent_pid is None and told.isdigit():
        parent_pid = int(told)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def watch_parent() -> int:
    """A pidfd of the parent, readable when it is gone; -1 when it cannot be watched."""
    try:
        return os.pidfd_open(os.getppid())
    except OSError:  # of another pid namespace, or gone this moment
        return -1


def use_short_time_slice(slice_ns: int = SLICE_NS) -> bool:
    """Ask for the processor often and for short: this thread, and those that it starts, are run soon after waking.

    Ranks spin on every core.  With the usual slice a woken stage may wait for milliseconds until one of them has
    used up its own; with a short one it goes first (Linux 6.12 and later; older kernels ignore it).  Its share
    of the processor stays the same.  False where the kernel refuses.
    """
    # struct sched_attr: size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period, clamps
    fields = struct.pack("=IIQiIQQQII", _SCHED_ATTR_BYTES, 0, 0, os.nice(0), 0, slice_ns, 0, 0, 0, 0)
    return int(_libc.syscall(_SYS_SCHED_SETATTR, 0, ctypes.create_string_buffer(fields, len(fields)), 0)) == 0


def open_child_signal_fd() -> int:
    """A descriptor that is readable when a child stops, goes on or ends; read it before looking which one.

    SIGCHLD is blocked from now on in this thread, and in those that it starts.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signals = 1 << (signal.SIGCHLD - 1)
    mask = ctypes.create_string_buffer(signals.to_bytes(_SIGSET_BYTES, sys.byteorder), _SIGSET_BYTES)
    return _descriptor(_libc.signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC))


def open_rename_watch(directory: Path) -> int:
    """A descriptor that is readable when something has been moved into `directory`. Raises `OSError`."""
    fd = _descriptor(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        _descriptor(_libc.inotify_add_watch(fd, os.fsencode(directory), _IN_MOVED_TO))
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
    """Orphaned descendants become our children, to be killed and waited for."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def sd_notify(state: str) -> bool:
    """Tell systemd (`READY=1`, `WATCHDOG=1`, ...). False without NOTIFY_SOCKET; never blocks."""
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


def watchdog_interval_s() -> float:
    """How often systemd wants `WATCHDOG=1` (half its limit); 0.0 when it does not."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    except ValueError:
        return 0.0


def claim_beat_fd() -> int:
    """The pipe to the supervisor, -1 when there is none.

    Taken out of the environment, so that no child of ours takes some file of its own for it.
    """
    try:
        fd = int(os.environ.pop(BEAT_FD_VARIABLE, "-1"))
        os.set_inheritable(fd, False)
    except (ValueError, OSError):
        return -1
    return fd


class Beat(NamedTuple):
    """To the supervisor: alive; kill me if nothing more is heard for `allowance_ms`."""

    allowance_ms: int
    was_ready: bool  # at some time in this life: it can be of use


def beat(fd: int, what: Beat) -> None:
    try:
        os.write(fd, _BEAT.pack(min(what.allowance_ms, 0xFFFFFFFF), what.was_ready))
    except OSError:  # full: it has enough to read; broken: the parent's pidfd says so
        pass


def read_beats(fd: int) -> Beat | None:
    """The supervisor's end: the last one written, None when there is nothing new."""
    last = None
    while True:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return last
        if len(data) < _BEAT.size:
            return last
        last = Beat(*_BEAT.unpack_from(data, len(data) - len(data) % _BEAT.size - _BEAT.size))
        if len(data) < 4096:
            return last
