"""What targets share: how to read an input as several parts, and a place for files."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def split(data: bytes, max_parts: int = 64) -> list[bytes]:
    """Read an input as parts: length (u16, little-endian) and bytes. The last one takes what is left."""
    parts: list[bytes] = []
    while data and len(parts) < max_parts:
        length = int.from_bytes(data[:2], "little")
        parts.append(data[2 : 2 + length])
        data = data[2 + length :]
    return parts


def join(parts: Iterable[bytes]) -> bytes:
    """The inverse of `split`."""
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


@cache
def scratch() -> Path:
    """A directory in memory, removed when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="starling-fuzz-", dir="/dev/shm"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def written(name: str, data: bytes) -> Path:
    """A file in `scratch` with these bytes."""
    path = scratch() / name
    path.write_bytes(data)
    return path
