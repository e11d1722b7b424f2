"""What a helper process of a stage prints, as lines of the stage's log.

Helpers (parsers, plugins, the mask processes) have no log of their own: a traceback, the last words of a native library
or the `print` of a plugin would be raw text between JSON lines, and in no file.  Each gets a pipe as its stderr; its
stage reads it with its own event loop and logs its lines: at most `LINES_AT_ONCE` of what it reads at once, and counts
the others.  The budget of the event is that of one helper: its field `helper` or `plugin` is in the logger's name.

A loop of asyncio watches the pipe after `watch`; any other caller watches `fd` and calls `read` when it is readable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio  # with ssl it is 3 MB, which stages without a loop of it do not need

READ_BYTES = 65_536  # at once: one that prints all the time must not hold the stage's loop
MAX_LINE_BYTES = 4_096  # a longer line is logged in parts
LINES_AT_ONCE = 50  # of a read; the others are counted


class HelperOutput:
    """The pipe of one process. Close `write_fd` (`started`) once the process has it."""

    def __init__(self, log: logging.Logger, facts: Mapping[str, Any]) -> None:
        """`facts`: fields of each line, which name the helper."""
        self._log = log.getChild(_channel(facts))  # budgets count by logger: none hides another helper's traceback
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
        received = self._rest + data
        end = received.rfind(b"\n") + 1
        end += (len(received) - end) // MAX_LINE_BYTES * MAX_LINE_BYTES
        self._rest = received[end:]
        self._write(received[:end])
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

    def _write(self, data: bytes) -> None:
        """Log the first lines, and the number of those after them."""
        lines = data.split(b"\n", LINES_AT_ONCE)
        rest = lines.pop() if len(lines) > LINES_AT_ONCE else b""
        for line in lines:
            for part in _parts(line.rstrip()):
                text = part.decode("utf-8", "replace")
                self._log.warning("output of a helper process", extra={**self._facts, "text": text})
        if rest:
            facts = {**self._facts, "lines_left_out": rest.count(b"\n") + (not rest.endswith(b"\n"))}
            self._log.warning("lines of a helper process are left out", extra=facts)


def _parts(line: bytes) -> list[bytes]:
    return [line[begin : begin + MAX_LINE_BYTES] for begin in range(0, len(line), MAX_LINE_BYTES)]


def _channel(facts: Mapping[str, Any]) -> str:
    """The last part of the logger's name: of a helper with these facts."""
    return "output:" + ":".join(str(value).replace(".", "_") for value in facts.values())
