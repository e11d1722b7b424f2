"""A log file that a thread writes: a slow disk costs lines, which are counted, and no time of a stage's loop."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from typing import Protocol

MAX_WAITING = 1 << 20  # bytes of lines that are not written yet
THREAD_NAME = "log"
CLOSE_S = 2.0  # a stage that ends waits this long for its last lines


class LineFile(Protocol):
    """What is written: `RotatingFile`."""

    lost: int

    def write(self, line: bytes) -> None:
        """Append one line."""

    def close(self) -> None:
        """Idempotent."""


class BackgroundFile:
    """Lines are written in order by a thread that starts with the first one, or with `start_writing`.

    A process that was forked from this one has no such thread: it writes its lines itself.
    """

    def __init__(self, file: LineFile, *, is_held: bool = False) -> None:
        """`is_held`: no thread until `start_writing`, for a process that will be forked; lines wait in memory."""
        self._file = file
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._nbytes = 0  # in `_waiting`, and of the lines being written
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._is_held = is_held

    @property
    def lost(self) -> int:
        """Lines that found no place, or that the disk refused."""
        return self._file.lost

    def write(self, line: bytes) -> None:
        """Queue one line. Never blocks on the disk."""
        if os.getpid() != self._pid:
            self._file.write(line)
            return
        with self._changed:
            if self._nbytes + len(line) > MAX_WAITING or self._is_closing:
                self._file.lost += 1
                return
            self._nbytes += len(line)
            self._waiting.append(line)
            if not self._is_held:
                self._start()

    def start_writing(self) -> None:
        """Start the thread now, with the CPUs that the calling thread has. Idempotent."""
        with self._changed:
            self._is_held = False
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            # Signals are the main thread's: one that this thread took would not end the main thread's poll().
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # there are too many: the next line has another attempt
                return
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                line = self._waiting.popleft()
            self._file.write(line)
            with self._changed:
                self._nbytes -= len(line)

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_S`. Idempotent."""
        if os.getpid() != self._pid:
            self._file.close()
            return
        with self._changed:
            self._is_closing = True
            if self._waiting:
                self._start()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                return  # it holds the file
        while self._waiting:  # for a thread that could not be started
            self._file.write(self._waiting.popleft())
        self._file.close()
