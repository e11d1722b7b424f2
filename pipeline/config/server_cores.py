"""The cores that a server may run on, as the first of its processes found them, for the number of its worker groups.

    RUN_DIR/server-cores   their numbers

All processes of a server divide its cores among the same worker groups, although each may be allowed others: a command
that runs under `taskset`, or a stage that starts again after the server's control group has got more of them.  With one
worker group the file only tells commands what another number would mean for the server.

The file belongs to the processes that have it locked, shared, for as long as they live.  What a killed server has left
is locked by none: commands ignore it, and the first stage of the next server, however that is started, replaces its
contents.  The lock is that of an open file description (F_OFD_SETLK of fcntl(2)): processes that are forked keep it, a
command can ask for it without taking it, and between writing and sharing no other process gets it.  An orderly stop
removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.stage")

FILE = "server-cores"

_LOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid

_EVERY_CORE = range(8192)  # more than Linux can have: the kernel takes those of the control group

_before: list[int] = []  # the cores of this process, before it kept to some of them
_had_all = False  # whether those were all of its control group: `taskset` had taken none
_joined: dict[Path, int] = {}  # descriptors of locked files; several only in a process with several configurations


def own() -> list[int]:
    """The cores that this process may run on, or might before it kept to some of them."""
    return _before or sorted(os.sched_getaffinity(0))


def keep_to(cores: list[int]) -> None:
    """Keep this thread, and those that it starts, to some of this process's cores. `own` stays as it is.

    Raises `OSError`: the thread runs where it did.
    """
    global _had_all
    here = os.sched_getaffinity(0)
    if not _before:
        os.sched_setaffinity(0, _EVERY_CORE)
        _had_all = os.sched_getaffinity(0) == here
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        os.sched_setaffinity(0, here)
        raise
    _before[:] = own() if _before else sorted(here)


def leave() -> None:
    """Let this thread run where it might before `keep_to`: a process begins with it that its parent has forked.

    If that was any core of the control group, it is any one that the group has now.
    """
    if _before:
        with contextlib.suppress(OSError):  # the control group has lost all of them: it has others
            os.sched_setaffinity(0, _EVERY_CORE if _had_all else _before)
        _before.clear()


@contextlib.contextmanager
def left() -> Iterator[None]:
    """`leave` until the end of the block, for computing and for new programs, which begin where this thread runs."""
    kept = sorted(os.sched_getaffinity(0)) if _before else []
    leave()
    try:
        yield
    finally:
        if kept:
            with contextlib.suppress(OSError):
                keep_to(kept)


def of(config: Config) -> list[int]:
    """The cores of the server; those of this process if no process of the server has stored them."""
    try:
        fd = os.open(_path(config), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return own()
    try:
        if not _is_locked(fd):
            return own()
        return msgspec.json.decode(os.pread(fd, 65536, 0), type=list[int]) or own()
    except (OSError, *DECODE_ERRORS):
        return own()
    finally:
        os.close(fd)


def check(config: Config, cores: Sequence[int]) -> None:
    """Raise `ConfigError` if a server with these cores has too few for its worker groups or control plane.

    Of models with `cpus` the configuration's rules check it.  Commands that start nothing may run on fewer cores.
    """
    n_cores = len(cores)
    control, groups = config.performance.control_cores, config.performance.worker_groups
    if control != "auto" and control >= max(1, n_cores):
        reason = f"ranks need a core, and the server has {n_cores}: give at most {n_cores - 1}, or auto"
        raise _refused("control_cores", control, reason)
    if groups != "auto" and groups > n_cores:
        for model in config.models:
            if not model.cpus:
                raise _refused("worker_groups", groups, too_many_groups(model.name, n_cores))


def _refused(key: str, value: int, reason: str) -> ConfigError:
    return ConfigError(f"performance.{key} = {value}: {reason}", param=f"performance.{key}")


def too_many_groups(model: str, n_cores: int) -> str:
    """Why a model cannot have more worker groups than cores."""
    return f"each group takes a core, and model {model!r} has {n_cores}: give at most {n_cores}"


def store(config: Config) -> None:
    """Store the cores of this process for all others, unless another one of the server has, and share the file's lock.

    For a process of the server.  With several worker groups it raises `OSError`, and as `check` if it is the first one.
    One group divides no cores, and needs no file.
    """
    path = _path(config)
    if _has_joined(path):
        return
    if config.performance.worker_groups != 1:
        _join(path, config)
        return
    try:
        _join(path, config)
    except OSError as error:
        log.warning("the cores of the server are not stored", extra={"path": str(path), "error": error.strerror})


def _has_joined(path: Path) -> bool:
    """Whether this process has the lock of the file. One that has been removed meanwhile is closed."""
    fd = _joined.get(path, -1)
    if fd >= 0 and not _is_at(path, fd):
        os.close(_joined.pop(path))
    return path in _joined


def _join(path: Path, config: Config) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if _lock(fd, fcntl.F_WRLCK):
                if config.performance.worker_groups != 1:
                    _check_or_remove(config, path)
                os.ftruncate(fd, 0)
                os.pwrite(fd, msgspec.json.encode(own()), 0)
            _lock(fd, fcntl.F_RDLCK, waits=True)  # while the first process writes
            if _is_at(path, fd):  # else a stopping server has removed it
                _joined[path] = fd
                return
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _check_or_remove(config: Config, path: Path) -> None:
    """`check`; no file is left of a start that it refuses."""
    try:
        check(config, own())
    except ConfigError:
        path.unlink(missing_ok=True)
        raise


def _lock(fd: int, kind: int, waits: bool = False) -> bool:
    """Lock the file, or change the lock; False if another process's lock excludes it and `waits` is not set."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK, struct.pack(_LOCK, kind, 0, 0, 0, 0))
    except BlockingIOError:
        return False
    return True


def _is_locked(fd: int) -> bool:
    """Whether any other descriptor of the file has it locked. Takes no lock."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(_LOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
    return bool(struct.unpack(_LOCK, answer)[0] != fcntl.F_UNLCK)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _path(config: Config) -> Path:
    return paths.run_dir(config) / FILE
