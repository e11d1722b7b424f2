"""The workers' doorbell: a Unix datagram socket whose datagrams say nothing but "look at the ring".

A ZeroMQ frame for each step costs the worker 50 us between two steps, and both sides a thread that
carries it; a datagram costs two.  The socket lies in the run directory, which is 0700.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

log = logging.getLogger("starling.scheduler")

MAX_PATH_BYTES = 107


class Doorbell:
    """`path` goes to the worker, "" when there is no bell (it then sends frames); poll `fd`, then `hear`."""

    def __init__(self, path: Path) -> None:
        self.path = ""
        self.fd = -1
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            log.info("the run directory's path is too long for a doorbell: frames will do")
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # Ours, of an earlier life: the stage's lock on the run directory is held by now.
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))
        self.path = str(path)
        self.fd = self._socket.fileno()

    def drain(self) -> None:
        """Take all rings: whoever comes late finds one for each step since."""
        try:
            while True:
                self._socket.recv(16)
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self.fd >= 0:
            self._socket.close()
            Path(self.path).unlink(missing_ok=True)
            self.fd = -1
