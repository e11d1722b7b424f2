"""Runs the Procfile for `starling up`, in its process, until a signal or the end of a stage.

Supervisors are forks of this process, which imports what they and their stages need (forked_supervisor.py). When it
dies, they let their stages finish, and end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.runtime.process import EXIT_FATAL, open_rename_watch
from starling.cli import honcho_patch
from starling.cli.users_lock import LastUser

AFTER_DRAIN_S = 3.0  # from the end of the time for streams until what still runs is killed
CHECK_S = 0.1  # between two calls of `check` when no stage reports a change


def run_procfile(
    procfile: Path,
    env: Mapping[str, str],
    run_dir: Path,
    check: Callable[[], bool],
    drain_s: float = 0.0,
    last_user: LastUser | None = None,
) -> int:
    """Start the processes of a Procfile, and wait for their end; 0 if a signal asked for it, otherwise not 0.

    Calls `check` whenever a stage has replaced its status record in `run_dir`, and every 100 ms, until it returns True.
    Handles the signals of this process meanwhile.  If one has asked for the end, further ones are ignored afterwards:
    they must not interrupt what the caller has left to do.  `drain_s`: how long streams may take once the end has been
    requested.  Raises `ConfigError`: the Procfile cannot be read, or PORT is no number.
    """
    env = {**env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"}
    manager = CheckingManager.of_procfile(procfile, env)
    before = {number: signal.getsignal(number) for number in honcho_patch.SIGNALS}
    manager.kill_s = max(manager.kill_s, drain_s + AFTER_DRAIN_S)
    manager.begin_checks(check, run_dir)
    if last_user is not None:
        manager.follow(last_user)
    try:
        manager.loop()
    finally:
        manager.end_checks()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if manager.n_signals else handler)
    return 0 if manager.n_signals else manager.returncode or EXIT_FATAL


class CheckingManager(honcho_patch.Manager):
    """Calls `check` when it is due, until it returns True or the processes are to end."""

    _check: Callable[[], bool] | None = None
    _due = 0.0  # monotonic s
    _renames = -1  # readable when a record has been replaced; -1: not watched

    def follow(self, last_user: LastUser) -> None:
        """Let the end of its users end the server, also if the child that waits for it is killed."""

        def on_end() -> None:
            self.events.unwatch(last_user.fd)
            if last_user.goes_on():
                self.follow(last_user)

        self.events.watch(last_user.fd, on_end)

    def begin_checks(self, check: Callable[[], bool], run_dir: Path) -> None:
        """Call `check` from now on, first when the first process has started."""
        self._check = check
        with contextlib.suppress(OSError):  # the number of inotify watches per user is limited
            self._renames = open_rename_watch(run_dir)
            self.events.watch(self._renames, self._on_rename)

    def end_checks(self) -> None:
        """Do not call `check` any more."""
        self._check = None
        if self._renames >= 0:
            self.events.unwatch(self._renames)
            os.close(self._renames)
            self._renames = -1

    def _on_rename(self) -> None:
        os.read(self._renames, 65536)
        self._due = 0.0

    def timeout_s(self) -> float:
        """How long `Events` may sleep."""
        until = super().timeout_s()
        return until if self._check is None else max(0.0, min(until, self._due - time.monotonic()))

    def on_wake(self) -> None:
        """What is due; `Events` calls it whenever it wakes."""
        super().on_wake()
        if self._check is None or time.monotonic() < self._due:
            return
        is_done = self.is_stopping or self._check()
        self._due = time.monotonic() + CHECK_S
        if is_done:
            self.end_checks()
