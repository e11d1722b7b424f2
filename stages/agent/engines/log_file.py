"""The output of an engine as a file of bounded size: NAME, and NAME.1 with what came before.

A thread writes it, so that `append` waits for no disk: the event loop that calls it also renews the agent's lease.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from pathlib import Path

MAX_BYTES = 8 << 20  # of each of the two files
MAX_WAITING_BYTES = 1 << 20  # of lines that the disk has not taken yet; further ones are lost


class LogFile:
    """Appends lines. A disk that is full, or takes none for long, loses lines and nothing else.

    All methods but `wait` may be called in an event loop.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, max_waiting: int = MAX_WAITING_BYTES) -> None:
        """`max_bytes`: of each of the two files. `max_waiting`: bytes of lines that wait for the disk."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._changed = threading.Condition()  # not held while the disk is waited for; guards what follows
        self._lines: deque[bytes] = deque()
        self._waiting = 0  # bytes, of `_lines` and of what the thread is writing
        self._lost = 0  # lines, since the last one that was taken
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def append(self, line: bytes) -> None:
        """Add a line, which ends with a newline. After `close` it is lost."""
        with self._changed:
            if self._is_closed:
                return
            if self._waiting + len(line) > self._max_waiting:
                self._lost += 1
                return
            self._note_lost()
            self._add(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine-log", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Take no more lines. The thread ends when it has written those that wait. Idempotent."""
        with self._changed:
            self._note_lost()
            self._is_closed = True
            self._changed.notify()

    def wait(self, timeout_s: float) -> bool:
        """Wait after `close` until everything is written; whether it is."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _note_lost(self) -> None:
        if self._lost:
            self._add(b"... %d lines are lost: the disk did not take them in time\n" % self._lost)
            self._lost = 0

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting += len(line)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._is_closed:
                    self._changed.wait()
                lines = list(self._lines)
                self._lines.clear()
            if not lines:
                return
            nbytes = sum(map(len, lines))
            with contextlib.suppress(OSError):
                self._write(deque(lines))
            with self._changed:
                self._waiting -= nbytes

    def _write(self, lines: deque[bytes]) -> None:
        while lines:
            with self._path.open("ab") as file:
                while lines and file.tell() < self._max_bytes:
                    file.write(lines.popleft())
                is_full = file.tell() >= self._max_bytes
            if is_full:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
