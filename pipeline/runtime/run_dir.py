"""The run directory: sockets, status records and locks of one server.

It has mode 0700 and belongs to this user, or it is refused.  The next start recognises what a crash has left: a
socket without a listener is removed, a lock is released with its holder, and a status record names a process
(pid, start_ticks) that has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline import procfs
from pipeline.errors import ConfigError, ResourceError
from pipeline.faults import points


def prepare(path: Path, what: str = "run directory", key: str = "server.run_dir") -> Path:
    """Create `path` (0700), or check its owner and mode; the resolved path. Raises `ConfigError`.

    A symbolic link of another user is not followed: it could lead to any directory of this user.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_symlink() and (owner := foreign_owner(path)) is not None:
            raise ConfigError(
                f"{what} {path} is a symbolic link of user {owner}: set {key} to a directory of your own", key
            )
        path = path.resolve(strict=True)
        info = path.stat()
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}; set {key} to another one", key) from None
    if info.st_uid != os.getuid():
        raise ConfigError(
            f"{what} {path} belongs to user {info.st_uid}, and this process runs as {os.getuid()}: set "
            f"{key} to a directory of your own",
            key,
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(
            f"{what} {path} has mode {stat.S_IMODE(info.st_mode):o}, so others could reach what is in it: "
            f"chmod 700 {path}",
            key,
        )
    return path


def foreign_owner(path: Path) -> int | None:
    """The user that owns `path`, if that is another one; a symbolic link is not followed. None: it does not exist."""
    try:
        owner = path.lstat().st_uid
    except OSError:
        return None
    return owner if owner != os.getuid() else None


def clear_socket(address: str) -> None:
    """Before binding `ipc://PATH`: remove the socket of a dead predecessor, and nothing else.

    libzmq would unlink any file at the path, the socket of a live server included.  Other schemes have
    nothing to remove.  Raises `ConfigError` when the path is in use or not a socket of this user.
    """
    if not address.startswith("ipc://"):
        return
    path = Path(address.removeprefix("ipc://"))
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise ConfigError(f"{path} exists and is not a socket: remove it")
    if info.st_uid != os.getuid():
        raise ConfigError(f"{path} is a socket of user {info.st_uid}: choose another server.run_dir")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(str(path))
    if code in (0, errno.EAGAIN):  # EAGAIN: the backlog is full, so a process listens
        raise ConfigError(f"{path} is in use by a live process: is this server running already?")
    if code in (errno.ECONNREFUSED, errno.ENOENT):
        path.unlink(missing_ok=True)
        return
    raise ConfigError(f"{path}: {os.strerror(code)}")


class StageLock:
    """`RUN_DIR/STAGE.lock`, held by the one process of this stage for as long as it lives."""

    def __init__(self, run_dir: Path, stage: str) -> None:
        self.path = run_dir / f"{stage}.lock"
        with _directory_locked(run_dir, fcntl.LOCK_SH):
            while not self._take(run_dir, stage):
                pass  # the file has been removed in between: the next attempt makes a new one
            # On a full disk the lock holds all the same; only the holder's pid is missing.
            with contextlib.suppress(OSError):
                points.DiskPoints("locks").write.hit()
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _take(self, run_dir: Path, stage: str) -> bool:
        """Open and lock the file. False: what has been locked is not the file at the path any more."""
        try:
            points.DiskPoints("locks").open.hit()
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(
                f"{self.path} cannot be made: {error.strerror}; free space in server.run_dir, or give another one",
                param="server.run_dir",
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).strip()
            os.close(fd)
            raise ConfigError(
                f"server.run_dir {run_dir} is in use: stage {stage} already runs there "
                f"({describe_process(int(holder) if holder.isdigit() else 0)}): stop it first (starling down), or give "
                f"this server its own STARLING_HOME, or its own server.run_dir and server.state_dir",
                "server.run_dir",
            ) from None
        self._fd = fd
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                return True
        self.release()
        return False

    def release(self) -> None:
        """Idempotent. The file stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def _directory_locked(run_dir: Path, operation: int) -> Iterator[None]:
    """Hold a lock of the directory itself, which orders those that take the locks in it and those that examine them.

    A stage takes its lock, and writes its pid, under a shared one.  A sweep (supervise/cleanup.py) and a question
    (`lock_holder`) hold other stages' locks for a moment, under an exclusive one: a stage that started meanwhile would
    be refused, as if it ran already.
    """
    try:
        fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # the error about the lock says what is wrong
        yield
        return
    try:
        fcntl.flock(fd, operation)
        yield
    finally:
        os.close(fd)


def describe_process(pid: int) -> str:
    """The process and when it started, for a message; 0: it is unknown."""
    if not pid:
        return "pid unknown"
    started = procfs.started_at(pid)
    since = time.strftime(", started %Y-%m-%d %H:%M:%S", time.localtime(started)) if started is not None else ""
    return f"pid {pid}{since}"


def lock_holder(run_dir: Path, stage: str) -> int:
    """The pid of the process that holds the stage's lock; 0 when it is free."""
    try:
        fd = os.open(run_dir / f"{stage}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        with _directory_locked(run_dir, fcntl.LOCK_EX):
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).strip()
                return int(pid) if pid.isdigit() else 0
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
    return 0
