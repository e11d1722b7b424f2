"""honcho as a child process: started on a Procfile, ended in order, and by force if it must be.

It runs outside of the terminal's foreground group, so that Ctrl-C reaches it once, from here.  Its death
is seen by every stage's supervisor, which then ends its stage; so ending honcho ends all.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from pipeline.runtime.process import EXIT_FATAL, die_with_parent

LOOK_S = 0.1
# honcho fails at a signal that comes before it has noted the start of every process.
SETTLED_S = 1.0
KILL_S = 7.0  # honcho itself kills its processes 5 s after SIGTERM
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Foreman:
    """One run of honcho. Takes over the signals of this process while it lasts."""

    def __init__(self, procfile: Path, env: Mapping[str, str]) -> None:
        self._asked = 0  # how often somebody wished for the end
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._old = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        self._begun = time.monotonic()
        me = os.getpid()

        def follow() -> None:
            die_with_parent(me)

        self._honcho = subprocess.Popen(
            [sys.executable, "-m", "starling.cli.honcho_patch", "start", "-f", str(procfile)],
            env={**env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"},
            process_group=0,
            preexec_fn=follow,
        )
        self._pidfd = os.pidfd_open(self._honcho.pid)
        self._poll = select.poll()
        for fd in (self._wake, self._pidfd):
            self._poll.register(fd, select.POLLIN)

    def run(self, look: Callable[[], bool]) -> int:
        """Until honcho is over: 0 when that was asked for. `look` is called every 100 ms until it is True."""
        try:
            has_seen = False
            while not self._asked and not self._is_over(None if has_seen else LOOK_S):
                has_seen = has_seen or look()
            if self._asked:
                self._end()
            code = self._honcho.wait()
            return 0 if self._asked else code or EXIT_FATAL
        finally:
            for number, handler in self._old.items():
                signal.signal(number, handler)
            os.close(self._pidfd)
            os.close(self._wake)

    def _end(self) -> None:
        """SIGTERM, and SIGKILL when that has no effect or somebody asks again."""
        self._wait_until(self._begun + SETTLED_S)
        self._honcho.terminate()
        if not self._wait_until(time.monotonic() + KILL_S):
            self._honcho.kill()

    def _wait_until(self, deadline: float) -> bool:
        """Is honcho over by then? Not waited for any longer once somebody asks again."""
        asked = self._asked
        while (left := deadline - time.monotonic()) > 0 and asked == self._asked:
            if self._is_over(left):
                return True
        return self._is_over(0.0)

    def _is_over(self, timeout_s: float | None) -> bool:
        """Wait for honcho's end, a signal or the time; is it over?"""
        ready = {fd for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return self._pidfd in ready

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        os.eventfd_write(self._wake, 1)  # poll() is resumed after a handler (PEP 475): this ends it
