"""Output for a reader that may stop reading, as a terminal after Ctrl-S does: lines are dropped, and writing goes on.

honcho prints within its loop. A print that waits for the reader would keep it from reading what the stages print, and
from its end. `starling logs` shows the lines of the stages all the same.
"""

from __future__ import annotations

import os
import select
from typing import TextIO

from starling.cli.broken_pipe import silence

WAIT_S = 1.0  # for the reader of the first line that does not fit
CHUNK = 512  # bytes that a writable pipe or terminal takes without waiting: POSIX's least PIPE_BUF


class BoundedOutput:
    """What `print(..., file=output, flush=True)` needs of a file. Not for several threads."""

    def __init__(self, stream: TextIO, wait_s: float = WAIT_S) -> None:
        """`wait_s`: how long a line may wait for the reader; those after it do not wait until one fits again."""
        self._stream = stream
        self._wait_s = wait_s
        self._text = ""
        self._n_dropped = 0
        self._poll = select.poll()
        self._poll.register(stream, select.POLLOUT)

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Is it a terminal?"""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Add to the line that `flush` writes."""
        self._text += text
        return len(text)

    def flush(self) -> None:
        """Write what was added, or drop it. A reader that has closed the pipe is ignored."""
        text, self._text = self._text, ""
        if self._n_dropped:
            text = f"\n({self._n_dropped} lines were not printed: the reader of this output did not read)\n{text}"
        data = text.encode(self._stream.encoding, "replace")
        wait_s = 0.0 if self._n_dropped else self._wait_s
        try:
            for at in range(0, len(data), CHUNK):
                if not self._poll.poll(wait_s * 1000):
                    self._n_dropped += 1
                    return
                _write(self.fileno(), data[at : at + CHUNK])
        except OSError:
            silence(self._stream)
        self._n_dropped = 0


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
