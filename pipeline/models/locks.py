"""Locks in the models directory: one process at a time fetches or ingests a model.

The holder removes the lock's file before it releases the lock, so that names of models that are gone, or never were
here, leave no files.  A process that has waited for a lock may therefore have locked a file that has been removed,
while another process has locked a new one.  So each compares the file that it has locked with the one at the path, and
begins again if they differ (`holds`).  A file that a killed holder has left is removed by the next holder, or by
`starling gc`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import ConfigError


@contextmanager
def lock(models_dir: Path, name: str, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold `models_dir/.NAME.lock`, waiting until it is free. The kernel releases it when its holder ends.

    `on_wait` is called once if another process holds it.
    """
    path, has_waited = models_dir / f".{name}.lock", False
    while True:
        fd = open_file(path)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_waited:
                    has_waited = True
                    on_wait()
                fcntl.flock(fd, fcntl.LOCK_EX)
            if holds(fd, path):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    try:
        yield
    finally:
        release(fd, path)


def open_file(path: Path) -> int:
    """Open the file of a lock, or make it. Raises `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"models directory {path.parent}: {error.strerror}; STARLING_HOME moves it") from None


def holds(fd: int, path: Path) -> bool:
    """Whether the file that has been locked is still the one at its path. If not, its holder has removed it."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def release(fd: int, path: Path) -> None:
    """Remove the file of a lock that this process holds, and release the lock."""
    with contextlib.suppress(OSError):  # a directory that may not be changed keeps its locks
        if holds(fd, path):
            path.unlink()
    os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of this file, shared or not. False if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def remove_unheld(models_dir: Path) -> list[Path]:
    """Remove the files of locks that no process holds, which killed holders have left; returns them."""
    removed = []
    for path in sorted(models_dir.glob(".*.lock")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if holds(fd, path):
                path.unlink()
                removed.append(path)
        except OSError:  # a process holds it, or the directory may not be changed
            pass
        finally:
            os.close(fd)
    return removed
