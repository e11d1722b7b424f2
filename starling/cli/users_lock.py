"""The lock by which a server that was started for commands knows that no command uses it any more (server_use.py)."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path

from pipeline.errors import ConfigError

USERS = "users.flock"  # not .lock: these are the locks of stages, which `pipeline.supervise.cleanup` takes


def open_lock(path: Path) -> int:
    """A descriptor of the lock file, which is made if it is missing. Raises `ConfigError`."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}; free space in server.run_dir") from None


def end_when_unused(run_dir: Path) -> None:
    """In `starling up --while-used`: send this process SIGTERM when no command uses the server any more."""
    users = open_lock(run_dir / USERS)

    def wait() -> None:
        fcntl.flock(users, fcntl.LOCK_EX)  # held until this process ends: a new user waits for that
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
