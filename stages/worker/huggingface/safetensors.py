"""A bounded reader of safetensors files: a JSON header of 8 bytes' length, then plain little-endian arrays.

Format: https://github.com/huggingface/safetensors#format.  Offsets and shapes are checked against the file's size
before anything is read, so that a truncated or corrupt file gives one clear error.  The arrays are views of a map.
"""

from __future__ import annotations

import mmap
import os
import weakref
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shm.decoding import DECODE_ERRORS
from stages.worker.huggingface.config import CheckpointDirectoryError

AGAIN = "fetch the file again"
_MAX_HEADER = 100_000_000  # bytes, by the specification
_MAX_DIMENSIONS = 8
_SHOWN = 120  # characters of a name in a message
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # those that a model's weights may have
_OTHERS = {"F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4, "U64": 8}


class Stored(NamedTuple):
    """A tensor: element type, shape, and its bytes from `start` in the file on."""

    file: SafetensorsFile
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def data(self) -> np.ndarray:
        """The bytes as the shape's rows, (rows, bytes of a row) u8; a view of the map."""
        raw = self.file.data[self.start : self.start + self.nbytes]
        return raw.reshape(self.shape[0] if len(self.shape) > 1 else 1, -1)


class SafetensorsFile:
    """An opened file: `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises `CheckpointDirectoryError`, `OSError`."""
        self.path = path
        with open(path, "rb") as file:
            self._fd = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._fd)
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 10:
                raise CheckpointDirectoryError(
                    f"{path}: file size is {self.size} bytes, expected at least 10 (a safetensors header); {AGAIN}"
                )
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.data = np.frombuffer(self._map, np.uint8)
        length = int.from_bytes(self._map[:8], "little")
        if length > min(self.size - 8, _MAX_HEADER):
            raise CheckpointDirectoryError(
                f"{path}: header length is {length}, expected at most {min(self.size - 8, _MAX_HEADER)}: not a "
                f"safetensors file, or truncated; {AGAIN}"
            )
        try:
            header = msgspec.json.decode(self._map[8 : 8 + length], type=dict[str, Any])
        except DECODE_ERRORS as error:
            raise CheckpointDirectoryError(f"{path}: header is not JSON ({error}); {AGAIN}") from None
        self.tensors: dict[str, Stored] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self.tensors[name] = self._tensor(name, entry, 8 + length)
        self._check_overlap()

    def _check_overlap(self) -> None:
        """Each byte belongs to one tensor, as the format asks, so that a checkpoint is no larger than its source."""
        placed = sorted(self.tensors.items(), key=lambda one: (one[1].start, one[1].nbytes))
        for (before, one), (name, other) in pairwise(placed):
            if one.start + one.nbytes > other.start:
                raise CheckpointDirectoryError(
                    f"{self.path}: tensor {name[:_SHOWN]!r} begins at byte {other.start}, inside {before[:_SHOWN]!r}, "
                    f"which ends at {one.start + one.nbytes}; {AGAIN}"
                )

    def _tensor(self, name: str, entry: Any, base: int) -> Stored:
        what = f"{self.path}: tensor {name[:_SHOWN]!r}"
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise CheckpointDirectoryError(f"{what} has no dtype, shape and two data_offsets; {AGAIN}") from None
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_count, shape)):
            raise CheckpointDirectoryError(f"{what}: shape is {str(shape)[:60]}, expected whole numbers; {AGAIN}")
        if not _is_count(begin) or not _is_count(end) or not begin <= end <= self.size - base:
            raise CheckpointDirectoryError(
                f"{what} needs bytes {begin}..{end} of {self.size - base} after the header: truncated or corrupt; "
                f"{AGAIN}"
            )
        width = ELEMENT_BYTES.get(dtype) or _OTHERS.get(dtype) if isinstance(dtype, str) else None
        if width is not None and prod(shape) * width != end - begin:
            raise CheckpointDirectoryError(
                f"{what}: {dtype} {shape} has {prod(shape) * width} bytes, found {end - begin}; {AGAIN}"
            )
        return Stored(self, str(dtype)[:20], tuple(shape), base + begin, end - begin)

    def identity(self) -> tuple[int, int, int]:
        """What changes when the opened file's bytes may have changed: size, mtime (ns), inode."""
        info = os.fstat(self._fd)
        return info.st_size, info.st_mtime_ns, info.st_ino

    def release(self, stored: Stored) -> None:
        """Drop the pages of a tensor from this process's memory; they stay in the page cache."""
        first = -(-stored.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = stored.start + stored.nbytes - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
