"""Lifetime locks on the directories that one server writes: state, arenas, spilled pages.

A server is several processes without a common parent (under systemd each stage is a unit), so each of its processes
shares the lock of a directory for as long as it lives: `DIRECTORY/server.lock`, locked with flock(2) in shared mode.
The restart of one stage cannot lose a lock that the other stages hold, and the kernel releases the share of a killed
process at once.  The content of the file names the server (device and inode of its run directory) and the processes
that hold it.  A process joins only holders of its own server.

Every change of lock and content is made under a short exclusive lock on the directory itself.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError
from pipeline.runtime.run_dir import describe_process
from shm.arena import process_ticks
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.runtime")

FILE_NAME = "server.lock"
_MOST_BYTES = 65536  # of the file's content


class Holder(msgspec.Struct):
    """One process that holds the lock."""

    server: str  # device and inode of the run directory
    run_dir: str
    pid: int
    start_ticks: int  # /proc/PID/stat field 22: with the pid, identifies the process uniquely


class DirectoryLock:
    """The share of this process in the lock of `directory`, which is created (0700) if it is missing.

    `key` names the configuration field.  Raises `ConfigError` when another server holds the lock.  If the file
    system refuses the lock file (full, read-only), a warning is logged and the directory is used without a lock: a
    disk that fails must not end a stage.
    """

    def __init__(self, directory: Path, run_dir: Path, key: str) -> None:
        self.path = directory / FILE_NAME
        self._fd = -1
        try:
            try:
                self._fd = _claim(directory, run_dir, key)
            except FileNotFoundError:
                self._fd = _claim(directory, run_dir, key)
        except OSError as error:
            log.warning(
                "a directory is used without a lock",
                extra={"key": key, "path": str(directory), "reason": error.strerror},
            )

    def release(self) -> None:
        """Idempotent. The file stays: unlinking a locked file would allow two holders."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ServerLocks:
    """The lifetime locks of one process of a server. Raises `ConfigError` when another server holds one of them."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        wanted = {
            paths.state_dir(config): "server.state_dir",
            paths.arena_dir(config): "server.arena_dir",
        }
        for model in config.models:
            if model.spill_path:
                directory = Path(os.path.abspath(expand_user(model.spill_path)))
                wanted.setdefault(directory, f"spill_path of model {model.name!r}")
        self._locks: list[DirectoryLock] = []
        try:
            for directory, key in wanted.items():
                self._locks.append(DirectoryLock(directory, run_dir, key))
        except ConfigError:
            self.release()
            raise

    def release(self) -> None:
        """Idempotent."""
        for lock in self._locks:
            lock.release()


def is_held(directory: Path) -> bool:
    """Whether a process holds the lock of a directory. No process joins it while this is examined."""
    try:
        fd = os.open(directory / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with _short_lock(directory):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the directory has just been removed
        return False
    finally:
        os.close(fd)


def _claim(directory: Path, run_dir: Path, key: str) -> int:
    """A descriptor that holds the lock. Raises `ConfigError`, `OSError`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = run_dir.stat()
    pid = os.getpid()
    own = Holder(f"{info.st_dev}:{info.st_ino}", str(run_dir), pid, process_ticks(pid))
    with _short_lock(directory):
        fd = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            holders = [] if _is_free(fd) else _read(fd)
            others = [one for one in holders if one.server != own.server]
            if others:
                raise ConfigError(_refusal(directory, key, others), key)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _write(fd, [*(one for one in holders if _is_alive(one)), own])
            if os.fstat(fd).st_nlink == 0:  # `cleanup.sweep` has removed the arena directory's files meanwhile
                raise FileNotFoundError(errno.ENOENT, "it is being removed")
        except BaseException:
            os.close(fd)
            raise
    return fd


@contextmanager
def _short_lock(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_free(fd: int) -> bool:
    """Whether no process holds the lock; it is then held exclusively."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.ftruncate(fd, 0)  # a holder of an earlier server must not be read if the disk is too full to write
    return True


def _read(fd: int) -> list[Holder]:
    """The holders; none if their file could not be written completely."""
    try:
        return msgspec.json.decode(os.pread(fd, _MOST_BYTES, 0), type=list[Holder])
    except DECODE_ERRORS:
        log.warning("a lock file is damaged: its holders are unknown")
        return []


def _write(fd: int, holders: list[Holder]) -> None:
    content = msgspec.json.encode(holders)
    try:
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
    except OSError as error:
        log.warning("the holders of a lock cannot be recorded", extra={"reason": error.strerror})


def _is_alive(holder: Holder) -> bool:
    return process_ticks(holder.pid) == holder.start_ticks


def _refusal(directory: Path, key: str, holders: list[Holder]) -> str:
    # Processes of another pid namespace are not visible: name the first one then.
    holder = next((one for one in holders if _is_alive(one)), holders[0])
    process = describe_process(holder.pid) if _is_alive(holder) else f"pid {holder.pid}"
    return (
        f"{key} {directory} is in use by another server ({process}, run directory {holder.run_dir}): set {key} "
        f"(or STARLING_HOME) to a directory of this server's own, or stop the other server (starling down)"
    )
