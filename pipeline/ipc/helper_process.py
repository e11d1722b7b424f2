"""A helper process of a stage: a module that runs on its own, started when it is needed, and again after its end.

Packets go through a socket pair (SOCK_SEQPACKET), whose number is the helper's second argument, after the stage's pid.
What the helper does not read at once waits here until the next `flush`.  What it prints becomes lines of the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from pipeline.observe.helper_output import HelperOutput

log = logging.getLogger("starling.helper")

RECEIVE_BYTES = 1 << 20  # more than a packet has
SEND_BYTES = 1 << 20  # of the socket's buffer, as far as the kernel allows
RESTART_S = 0.5  # between two starts


class Loop(Protocol):
    """What is needed of the stage's loop."""

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic, s."""

    def add_fd(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is readable."""

    def remove_fd(self, fd: int) -> None:
        """Call before `fd` is closed."""


class Callbacks(NamedTuple):
    """Of one helper: a packet of it, and around each of its lives."""

    on_packet: Callable[[bytes], None]
    on_started: Callable[[], None] = lambda: None
    on_died: Callable[[], None] = lambda: None  # by itself, not by `kill`


class HelperProcess:
    """One helper: `python -m MODULE PARENT_PID FD ARGUMENTS`."""

    def __init__(self, module: str, arguments: tuple[str, ...], loop: Loop, callbacks: Callbacks) -> None:
        self._module, self._arguments = module, arguments
        self._loop = loop
        self._callbacks = callbacks
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._output: HelperOutput | None = None
        self._unsent: deque[bytes] = deque()
        self._start_after = float("-inf")

    @property
    def pid(self) -> int:
        """Of the process; 0: none runs."""
        return self._process.pid if self._process is not None else 0

    def ensure_started(self) -> bool:
        """Start the process unless it runs. False: its predecessor was started a moment ago."""
        if self._process is not None:
            return True
        now = self._loop.clock()
        if now < self._start_after:
            return False
        self._start_after = now + RESTART_S
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        for one in (ours, theirs):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        output = self._output = HelperOutput(log, self._facts())
        command = [sys.executable, "-P", "-m", self._module, str(os.getpid()), str(theirs.fileno()), *self._arguments]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output.write_fd,
        )
        theirs.close()
        output.started(self._process.pid)
        self._loop.add_fd(output.fd, self._read_output)
        self._channel = ours
        self._loop.add_fd(ours.fileno(), self._receive)
        self._callbacks.on_started()
        return True

    def send(self, packets: Iterable[bytes]) -> None:
        """Send packets, in order; the process must be started."""
        self._unsent.extend(packets)
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        channel, unsent = self._channel, self._unsent
        try:
            while channel is not None and unsent:
                channel.send(unsent[0])
                unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._died()

    def _receive(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            while packet := channel.recv(RECEIVE_BYTES):
                self._callbacks.on_packet(packet)
                if self._channel is not channel:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a helper process cannot be read", extra={**self._facts(), "reason": str(error)})
        self._died()

    def _read_output(self) -> None:
        if self._output is not None and not self._output.read():
            self._close_output()

    def _close_output(self) -> None:
        if self._output is not None:
            self._loop.remove_fd(self._output.fd)
            self._output.close()
            self._output = None

    def _facts(self) -> dict[str, str]:
        return {"helper": self._module, "task": self._arguments[0]}

    def _died(self) -> None:
        log.warning("a helper process has ended", extra=self._facts())
        channel = self._channel
        # What it sent last. Reading fails once, before that, if the process left packets unread.
        with contextlib.suppress(OSError):
            while channel is not None and (packet := channel.recv(RECEIVE_BYTES)):
                self._callbacks.on_packet(packet)
                if self._channel is not channel:
                    return
        self.kill()
        self._callbacks.on_died()

    def kill(self) -> None:
        """End the process, and wait until it has ended: it writes into no arena any more. Idempotent."""
        if self._channel is not None:
            self._loop.remove_fd(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._close_output()
        self._unsent.clear()
