"""The lock by which a server that was started for commands knows that no command uses it any more (server_use.py)."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.runtime import process
from pipeline.supervise.base import fork

USERS = "users.flock"  # not .lock: these are the locks of stages, which `pipeline.supervise.cleanup` takes


def open_lock(path: Path) -> int:
    """A descriptor of the lock file, which is made if it is missing. Raises `ConfigError`."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}; free space in server.run_dir") from None


class LastUser:
    """In `starling up --while-used`: sends this process SIGTERM when no command uses the server any more.

    A child waits for that, because a process with a second thread cannot be forked (forked_program.py).  `fd` is its
    pidfd.
    """

    def __init__(self, run_dir: Path) -> None:
        self._users = open_lock(run_dir / USERS)  # stays open: a new user waits until this process has ended, too
        self._server = os.getpid()
        self.fd = os.pidfd_open(fork(self._wait))

    def _wait(self) -> int:
        process.close_files(keep=self._users)  # no other lock may outlive the server
        fcntl.flock(self._users, fcntl.LOCK_EX)
        os.kill(self._server, signal.SIGTERM)
        return process.EXIT_OK

    def goes_on(self) -> bool:
        """The child has ended. If it was killed, another one waits, with another `fd`; otherwise False."""
        ended = os.waitid(os.P_PIDFD, self.fd, os.WEXITED)
        os.close(self.fd)
        if ended is not None and ended.si_code == os.CLD_EXITED:
            return False
        self.fd = os.pidfd_open(fork(self._wait))
        return True
