"""The workers' doorbell: a Unix datagram socket whose datagrams only mean "read the step ring".

A ZeroMQ frame per step costs the worker 50 us between two steps and needs a ZeroMQ thread on both sides; a
datagram costs 2 us.  The socket is in the run directory, which has mode 0700.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

log = logging.getLogger("starling.scheduler")

MAX_PATH_BYTES = 107  # sun_path has 108, including the final zero


class Doorbell:
    """`path` is sent to the worker; "" without a socket: the worker then sends frames. Poll `fd`, then `drain`."""

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
        """Receive all datagrams; several may have arrived since the last call."""
        try:
            while True:
                self._socket.recv(16)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._socket.close()
            Path(self.path).unlink(missing_ok=True)
            self.fd = -1
