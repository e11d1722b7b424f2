"""How much of a `.bin` is here while it is still downloaded: a record of four words beside it.

    DIGEST.arrival   i64 words: layout, state, verified bytes, time of the last sign of life of the writer (ns)

The process that downloads the `.bin` gives it its full size first.  It stores VERIFIED, the length of the leading part
whose pieces have their checksums, after it has written these pieces: a reader that loads the word and then reads the
mapped file below it sees verified bytes alone.  VERIFIED never shrinks, and verified bytes do not change.  The time is
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Self

import numpy as np

from shm import words

LAYOUT = 1
_LAYOUT, _STATE, _VERIFIED, _ALIVE = range(4)
_NBYTES = 32
ARRIVING, COMPLETE, FAILED = range(1, 4)


def arrival_path(path: Path) -> Path:
    """Path of the record that belongs to a `.bin` or `.idx`."""
    return path.with_suffix(".arrival")


class _Record:
    """The mapped words. A context manager."""

    def __init__(self, fd: int, prot: int) -> None:
        self._map = mmap.mmap(fd, _NBYTES, mmap.MAP_SHARED, prot)
        self._words = np.frombuffer(self._map, np.int64)

    @property
    def state(self) -> int:
        """ARRIVING, COMPLETE or FAILED."""
        return words.load(self._words, _STATE)

    @property
    def verified(self) -> int:
        """Bytes from the start of the `.bin` that may be read."""
        return words.load(self._words, _VERIFIED)

    def close(self) -> None:
        """Unmap the record. Idempotent."""
        self._words = np.zeros(_NBYTES // 8, np.int64)
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ArrivalWriter(_Record):
    """The record of a download that begins. One writer."""

    def __init__(self, path: Path) -> None:
        """Create it. Raises `OSError`, also if it exists; on a full disk a file of no use may be left."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _NBYTES)  # a store to a hole of a file on a full disk ends the process
            super().__init__(fd, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.beat()
        words.store(self._words, _STATE, ARRIVING)
        words.store(self._words, _LAYOUT, LAYOUT)

    def advance(self, verified: int) -> None:
        """`verified` bytes may be read now; call it after they have been written."""
        words.store(self._words, _VERIFIED, max(verified, self.verified))

    def beat(self) -> None:
        """Store the time: the download goes on."""
        words.store(self._words, _ALIVE, time.monotonic_ns())

    def finish(self, *, is_complete: bool) -> None:
        """All bytes are verified, or no more will come. Idempotent."""
        if self.state == ARRIVING:
            words.store(self._words, _STATE, COMPLETE if is_complete else FAILED)


class Arrival(_Record):
    """The record, read by a process that maps the `.bin`."""

    def __init__(self, path: Path) -> None:
        """Raises `FileNotFoundError`, `OSError`, and `ValueError` for a record of another layout."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (size := os.fstat(fd).st_size) != _NBYTES:
                raise ValueError(f"{path}: {size} bytes, expected {_NBYTES}: load the model again")
            super().__init__(fd, mmap.PROT_READ)
        finally:
            os.close(fd)
        if (layout := words.load(self._words, _LAYOUT)) != LAYOUT:
            self.close()
            raise ValueError(f"{path}: layout is {layout}, expected {LAYOUT}: load the model again")

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life of the download."""
        return (time.monotonic_ns() - words.load(self._words, _ALIVE)) / 1e9
