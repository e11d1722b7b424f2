"""The output of an engine as a file of bounded size: NAME, and NAME.1 with what came before."""

from __future__ import annotations

import contextlib
from pathlib import Path

MAX_BYTES = 8 << 20  # of each of the two files


class LogFile:
    """Appends lines. A disk that is full loses lines and nothing else."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def append(self, line: bytes) -> None:
        """Add a line, which ends with a newline."""
        with contextlib.suppress(OSError):
            with self._path.open("ab") as file:
                file.write(line)
                is_full = file.tell() >= self._max_bytes
            if is_full:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
