"""What a helper process of a stage prints, as lines of the stage's log.

Helpers (parsers, plugins, the mask processes) have no log of their own: a traceback, the last words of a native library
or the `print` of a plugin would be raw text between JSON lines, and in no file.  Each gets a pipe as its stderr; its
stage reads it with its own event loop and logs each line, under the budget of the event.

A loop of asyncio watches the pipe after `watch`; any other caller watches `fd` and calls `read` when it is readable.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

READ_BYTES = 65_536  # at once: one that prints all the time must not hold the stage's loop
MAX_LINE_BYTES = 4_096  # a longer line is logged in parts


class HelperOutput:
    """The pipe of one process. Close `write_fd` (`started`) once the process has it."""

    def __init__(self, log: logging.Logger, facts: Mapping[str, Any]) -> None:
        """`facts`: fields of each line, which name the helper."""
        self._log = log
        self._facts = dict(facts)
        self._rest = b""  # of a line whose end has not arrived
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches `fd`
        self.fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)

    def started(self, pid: int) -> None:
        """The process has the other end of the pipe."""
        self._facts["helper_pid"] = pid
        os.close(self.write_fd)
        self.write_fd = -1

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let `loop` read the pipe until its end, or until `close`."""
        self._loop = loop
        loop.add_reader(self.fd, self._read_watched)

    @property
    def is_watched(self) -> bool:
        """A loop reads it: its end has not been read."""
        return self._loop is not None

    def _read_watched(self) -> None:
        if not self.read():
            self._unwatch()

    def _unwatch(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.fd)
            self._loop = None

    def read(self) -> bool:
        """Log what has arrived. False: the pipe has ended, and is not to be watched any more."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._write(line)
        while len(self._rest) >= MAX_LINE_BYTES:
            self._write(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        return bool(data)

    def close(self) -> None:
        """Log what is left in the pipe, and close it. Idempotent."""
        if self.fd < 0:
            return
        self._unwatch()
        self.read()
        self._write(self._rest)
        os.close(self.fd)
        if self.write_fd >= 0:
            os.close(self.write_fd)
        self.fd = self.write_fd = -1

    def _write(self, line: bytes) -> None:
        for begin in range(0, len(line), MAX_LINE_BYTES):
            text = line[begin : begin + MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
            if text:
                self._log.warning("output of a helper process", extra={**self._facts, "text": text})
