"""The workers' doorbell: a Unix datagram socket whose datagrams only mean "read the step ring".

A ZeroMQ frame per step costs the worker 50 us between two steps and needs a ZeroMQ thread on both sides; a
datagram costs 2 us.  The socket is in the run directory, which has mode 0700.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

log = logging.getLogger("starling.scheduler")

MAX_PATH_BYTES = 107  # sun_path has 108, including the final zero


class Doorbell:
    """`path` is sent to the worker; "" without a socket: the worker then sends frames. Poll `fd`, then call `drain`."""

    def __init__(self, path: Path) -> None:
        self.path = ""
        self.fd = -1
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            log.info("run directory path too long for a doorbell, using frames")
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # The stage holds its lock, so a file here is from an earlier process of this stage.
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))
        self.path = str(path)
        self.fd = self._socket.fileno()

    def drain(self) -> None:
        """Receive a datagram. If more have arrived, `fd` stays readable: usually there is one for each sleep.

        To ask for a second one ends in an exception, which takes longer than all else here.
        """
        with contextlib.suppress(BlockingIOError):  # there was none
            self._socket.recv(16)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._socket.close()
            Path(self.path).unlink(missing_ok=True)
            self.fd = -1


class Ringer:
    """The worker's side of it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._path = ""
        self.connected_fd = -1  # for kernels, which ring by themselves; -1: they cannot, and `ring` does

    def connect(self, path: str) -> None:
        """Ring this doorbell from now on; "": none."""
        self._path, self.connected_fd = path, -1
        if path:
            try:
                self._socket.connect(path)
                self.connected_fd = self._socket.fileno()
            except OSError:
                pass

    def ring(self) -> bool:
        """False: there is no doorbell, or it has gone."""
        if not self._path:
            return False
        try:
            self._socket.sendto(b"", self._path)
        except BlockingIOError:
            pass  # the scheduler has unread rings: another one adds nothing
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
