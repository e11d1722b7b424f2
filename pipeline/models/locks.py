"""Locks in the models directory: one process at a time fetches or ingests a model."""

from __future__ import annotations

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
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(models_dir / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"models directory {models_dir}: {error.strerror}; STARLING_HOME moves it") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
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
