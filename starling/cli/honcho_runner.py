"""Runs honcho as a child process on a Procfile: stops it with SIGTERM, then with SIGKILL.

honcho runs outside the terminal's foreground process group, so that Ctrl-C does not reach it directly. Every stage's
supervisor detects honcho's death and then ends its stage; therefore stopping honcho stops all stages.

It is a fork of this process, and the supervisors are forks of it: all share the memory of what is imported here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from pipeline.runtime.malloc_trim import trim
from pipeline.runtime.process import EXIT_FATAL, LOST_SIGNAL_S, die_with_parent, open_rename_watch
from starling.cli.forked_program import ForkedProgram, can_fork
from starling.cli.forked_supervisor import command_of, preload
from starling.cli.stage import STAGES

CHECK_S = 0.1  # between two calls of `check` when no stage reports a change
KILL_S = 7.0  # from SIGTERM to SIGKILL; honcho itself kills its processes after 5 s
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HonchoRunner:
    """One run of honcho. Handles the signals of this process until it ends."""

    def __init__(self, procfile: Path, env: Mapping[str, str], run_dir: Path) -> None:
        """`run_dir`: where stages place their status records."""
        self._signals = 0  # received: each asks for the end
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._old = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        arguments = ["start", "-f", str(procfile)]
        env = {**env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"}
        # A child of the fork has as much room for its command as this process.
        longest = max((command_of(stage) for stage in STAGES), key=lambda words: len("".join(words)))
        self._renames = -1  # readable when a record has been replaced; -1: not watched
        with contextlib.suppress(OSError):  # the number of inotify watches per user is limited
            self._renames = open_rename_watch(run_dir)
        self._honcho = _fork(arguments, env) if can_fork(longest) else _spawn(arguments, env)
        self._pidfd = os.pidfd_open(self._honcho.pid)
        self._poll = select.poll()
        for fd in (self._wake, self._pidfd, *([self._renames] if self._renames >= 0 else [])):
            self._poll.register(fd, select.POLLIN)

    def run(self, check: Callable[[], bool]) -> int:
        """Wait for honcho's end. Returns 0 if a signal ended it.

        Calls `check` whenever a stage has replaced its status record, and every 100 ms, until it returns True.
        """
        try:
            is_checked = False
            while not self._signals and not self._is_over(LOST_SIGNAL_S if is_checked else CHECK_S):
                if not is_checked and check():
                    is_checked = True
                    self._end_watch()
            if self._signals:
                self._end()
            code = self._honcho.wait()
            return 0 if self._signals else code or EXIT_FATAL
        finally:
            for number, handler in self._old.items():
                signal.signal(number, handler)
            self._end_watch()
            os.close(self._pidfd)
            os.close(self._wake)

    def _end_watch(self) -> None:
        if self._renames >= 0:
            self._poll.unregister(self._renames)
            os.close(self._renames)
            self._renames = -1

    def _end(self) -> None:
        """SIGTERM, then SIGKILL after `KILL_S` or at a second signal."""
        received = self._signals  # before honcho announces its end, at which a user may ask again
        self._honcho.terminate()
        if not self._wait_until(time.monotonic() + KILL_S, received):
            self._honcho.kill()

    def _wait_until(self, deadline: float, received: int) -> bool:
        """Has honcho ended by `deadline`? Returns early if there are more signals than `received`."""
        while (left := deadline - time.monotonic()) > 0 and received == self._signals:
            if self._is_over(left):
                return True
        return self._is_over(0.0)

    def _is_over(self, timeout_s: float) -> bool:
        """Wait for honcho's end, a signal or the timeout (s). True if honcho has ended."""
        ready = {fd for fd, _ in self._poll.poll(timeout_s * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._renames in ready:
            os.read(self._renames, 65536)
        return self._pidfd in ready

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        os.eventfd_write(self._wake, 1)  # after a handler Python resumes poll() (PEP 475); this ends it


def _fork(arguments: list[str], env: Mapping[str, str]) -> ForkedProgram:
    preload()
    trim()

    def run() -> None:
        from starling.cli import honcho_patch

        sys.argv = ["honcho", *arguments]
        honcho_patch.main()

    return ForkedProgram(["honcho", *arguments], run, env, dies_with_parent=True)


def _spawn(arguments: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """As a new program, for a process with threads."""
    parent_pid = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-m", "starling.cli.honcho_patch", *arguments],
        env=env,
        process_group=0,
        preexec_fn=lambda: die_with_parent(parent_pid),
    )
