"""A process that is started again, with a backoff, when it ends, and that ends with this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from pipeline.runtime.process import EXIT_CONFIG, die_with_parent
from starling.cli import terminal

FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.2, 10.0
STEADY_S = 30.0  # a process that ran for so long starts with the first backoff again


class Child:
    """One `starling` command. Call from one thread: the process ends with the thread that has started it."""

    def __init__(self, name: str, arguments: list[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._command = [sys.executable, "-P", "-m", "starling", *arguments]
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._begun = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._next = 0.0

    @property
    def pid(self) -> int:
        """Of the running process; 0: none runs."""
        return self._process.pid if self._process is not None else 0

    def tick(self, now: float) -> int | None:
        """Start it, or start it again; an exit code that no restart can cure, or None."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return None
            self._process = None
            if code == EXIT_CONFIG:
                return code
            if now - self._begun > STEADY_S:
                self._backoff_s = FIRST_BACKOFF_S
            self._pause(now, f"ended with {code}")
        if now >= self._next:
            parent = os.getpid()
            self._begun = now
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=dict(self._env),
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                    preexec_fn=lambda: die_with_parent(parent),
                )
            except OSError as error:  # too many processes, or too little memory
                self._pause(now, f"cannot be started: {error.strerror}")
            else:
                self.starts += 1
        return None

    def _pause(self, now: float, why: str) -> None:
        terminal.print_error(f"{self.name} {why}; it is started again in {self._backoff_s:g} s")
        self._next = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MOST_BACKOFF_S)

    def ask_to_end(self) -> None:
        """SIGTERM; `end` waits."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def end(self, deadline: float) -> None:
        """SIGTERM; SIGKILL at the deadline (s, monotonic)."""
        self.ask_to_end()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
