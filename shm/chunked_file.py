"""Appends to a file in calls that each write a whole chunk, so that its pages in memory are huge ones.

A file system with large folios, such as XFS, and ext4 since Linux 6.16, takes memory for as much as a call writes, in
blocks that are aligned like their place in the file.  What a call writes from a multiple of 2 MiB on lies in huge
pages, and a process that maps the file needs one entry of its page table for each.  Many short calls get pages of
4 KB, until the file is read again after it has left the memory.  The bytes are the same in each case.
"""

from __future__ import annotations

from typing import IO

from shm.huge_pages import HUGE_BYTES

CHUNK_BYTES = HUGE_BYTES


class ChunkedFile:
    """Appends to an unbuffered binary `file` whose position is `at`, its end."""

    def __init__(self, file: IO[bytes], at: int) -> None:
        self._file = file
        self.written = at  # bytes of the file that the kernel has
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._filled = at % CHUNK_BYTES  # bytes of the chunk, with those of it that are written

    @property
    def end(self) -> int:
        """The length of the file once all bytes are written."""
        return self.written // CHUNK_BYTES * CHUNK_BYTES + self._filled

    def append(self, raw: memoryview) -> None:
        """Append bytes; of them and those before, all complete chunks are written. Raises `OSError`."""
        while raw:
            taken = raw[: CHUNK_BYTES - self._filled]
            self._chunk[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            raw = raw[len(taken) :]
            if self._filled == CHUNK_BYTES:
                self.flush()
                self._filled = 0

    def flush(self) -> None:
        """Write what is not written yet, however short. Raises `OSError`."""
        rest = self._chunk[self.written % CHUNK_BYTES : self._filled]
        while rest:
            n = self._file.write(rest)
            self.written, rest = self.written + n, rest[n:]
