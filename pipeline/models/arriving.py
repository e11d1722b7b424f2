"""A file that is being downloaded, as its readers see it: they wait for the bytes that they need.

One thread reports complete pieces, others wait.  Pieces may be complete in any order; their bytes do not change any
more.  The file has its final size from the beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol


class Abandoned(Exception):
    """The file will not be complete: the download has failed, or begins again with other bytes."""


class ArrivingFile:
    """A file of `size` bytes at `path`, which arrives in pieces of `piece_bytes`."""

    def __init__(self, path: Path, size: int, piece_bytes: int, complete: Iterable[int] = ()) -> None:
        """`complete`: pieces that are here already."""
        self.path, self.size, self._piece_bytes = path, size, piece_bytes
        self._changed = threading.Condition()
        self._missing = set(range(-(-size // piece_bytes))) - set(complete)
        self._is_abandoned = False
        self._digest = ""
        self._begin = 0  # all bytes before it are here; read without the lock, because it only grows
        self._advance()

    def _advance(self) -> None:
        self._begin = min(self._missing) * self._piece_bytes if self._missing else self.size

    def add(self, piece: int) -> None:
        """A piece is complete."""
        with self._changed:
            self._missing.discard(piece)
            self._advance()
            self._changed.notify_all()

    def wait(self, begin: int, end: int) -> None:
        """Wait until the bytes [begin, end) are here. Raises `Abandoned`."""
        if end <= self._begin and not self._is_abandoned:
            return
        wanted = range(begin // self._piece_bytes, -(-min(end, self.size) // self._piece_bytes))
        with self._changed:
            while not self._is_abandoned and not self._missing.isdisjoint(wanted):
                self._changed.wait()
            if self._is_abandoned:
                raise Abandoned

    def accept(self, digest: str) -> None:
        """The file is complete, has this SHA-256 (hex), and is the one that is wanted."""
        with self._changed:
            self._digest = digest
            self._changed.notify_all()

    def wait_digest(self) -> str:
        """Wait for `accept`; the digest. Raises `Abandoned`."""
        with self._changed:
            while not self._is_abandoned and not self._digest:
                self._changed.wait()
            if self._is_abandoned:
                raise Abandoned
            return self._digest

    def abandon(self) -> None:
        """The file will not be complete, is not wanted, or its readers are to end. Idempotent."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    @property
    def missing_bytes(self) -> int:
        """How many bytes are still to come."""
        with self._changed:
            return min(self.size, len(self._missing) * self._piece_bytes)


class Reader(Protocol):
    """Uses a file while it is downloaded. All calls come from one thread, which may not wait."""

    def begin(self, file: ArrivingFile) -> None:
        """A download begins, or begins again: an earlier file was abandoned."""

    def accepted(self, digest: str) -> None:
        """The file is in its place; wait until it is used."""

    def close(self) -> None:
        """End, whatever has happened."""
