"""The certificate in use, kept for the next gateway in memory that the supervisor owns.

A gateway that is restarted while the files cannot be used goes on with what its predecessor had.  Nothing reaches a
disk: the memory has no name, and ends with the supervisor and its gateway.
"""

from __future__ import annotations

import os

import msgspec

from pipeline.supervise.listen_fd import TLS_VARIABLE
from pipeline.tls.certificate import Contents


class KeptCertificate:
    """In the gateway. Without a supervisor nothing is kept."""

    def __init__(self) -> None:
        given = os.environ.pop(TLS_VARIABLE, "")
        self._fd = int(given) if given.isdigit() else -1

    def read(self) -> Contents | None:
        """What was stored; None if there is nothing, or only a part of it."""
        if self._fd < 0:
            return None
        try:
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            return msgspec.msgpack.decode(data, type=Contents)
        except (OSError, msgspec.DecodeError):
            return None

    def store(self, contents: Contents) -> None:
        """Replace what is stored."""
        if self._fd < 0:
            return
        data = msgspec.msgpack.encode(contents)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
