"""A bounded reader of GGUF files (versions 2 and 3, little endian): metadata and where tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  Every count, length and offset is
checked against the file's size before it is used, so that a truncated or corrupt file gives one clear error and never
a crash or a large allocation.  Arrays of numbers are views of the mapped file; what becomes Python objects (names,
texts, entries of lists) has bounds of its own, because an object takes many times the bytes of its encoding.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stages.worker.checkpoint.source import TensorInfo
from stages.worker.kernels.formats import BY_ID

__all__ = ["AGAIN", "GgufError", "GgufFile", "TensorInfo"]

MAGIC = b"GGUF"
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_VOCABULARY = "tokenizer.ggml."  # keys of tokens and merges
_MAX_DIMENSIONS = 4
_MAX_KEY = 65_535  # bytes of a metadata key, by the specification
_MAX_NAME = 255  # bytes of a tensor's name; published names have at most 64
_SHOWN = 80  # characters of a key in a message
# Bounds on Python objects. The largest published models have about 100 keys, 10,000 tensors, 800,000 texts in arrays
# (tokens and merges) and 20 MB of text.
_MAX_KEYS = 1 << 12
_MAX_TENSORS = 1 << 17
_MAX_ENTRIES = 1 << 21  # of arrays that become lists: texts, and arrays of arrays
_NESTED_ENTRIES = 16  # that an array within an array counts for
_MAX_TEXT_BYTES = 1 << 26  # of all names and texts
AGAIN = "fetch or convert the file again"  # the remedy for a damaged file


class GgufError(ValueError):
    """A GGUF file cannot be used. The message names file, field or tensor, value, bound and remedy."""


class GgufFile:
    """An opened file: `metadata` by key (arrays of numbers as NumPy arrays), `tensors` by name, `data` as bytes."""

    def __init__(self, path: Path, opened: BinaryIO | None = None) -> None:
        """Read header, metadata and tensor table. Raises `GgufError`, `OSError`.

        opened: the file, if it may be at another path by now; it is closed here.
        """
        self.path = path
        with opened or open(path, "rb") as file:
            self._fd = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._fd)
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 24:
                raise GgufError(
                    f"{path}: file size is {self.size} bytes, expected at least 24 (a GGUF header); {AGAIN}"
                )
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.data = np.frombuffer(self._map, np.uint8)
        self._at = 0
        self._what = "header"
        self._must_be_utf8 = False  # of the texts of the current key
        self._n_entries = self._text_bytes = 0
        magic = self._take(4)
        if magic != MAGIC:
            is_part = path.suffix == ".safetensors"
            remedy = "give the directory that it is in" if is_part else "convert the model to GGUF"
            raise GgufError(f"{path}: magic is not {MAGIC!r}: not a GGUF file; {remedy}")
        version = self._scalar("<I")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version in (0x02000000, 0x03000000) else ""
            raise GgufError(f"{path}: GGUF version is {version}{hint}, expected 2 or 3; convert the model again")
        n_tensors, n_keys = self._scalar("<Q"), self._scalar("<Q")
        # Smallest entries: name length, dimension count, type and offset; name length, type and value.
        self._count("tensor_count", n_tensors, 24)
        self._count("metadata_kv_count", n_keys, 13)
        self._bound("tensor_count", n_tensors, _MAX_TENSORS)
        self._bound("metadata_kv_count", n_keys, _MAX_KEYS)
        self.metadata: dict[str, Any] = {}
        for i in range(n_keys):
            self._what = f"metadata key {i}"
            key = self._string(_MAX_KEY)
            self._what = f"metadata key {key[:_SHOWN]!r}"
            # Other texts are read with U+FFFD for what is no UTF-8; a token would become another one.
            self._must_be_utf8 = key.startswith(_VOCABULARY)
            self.metadata[key] = self._value(self._scalar("<I"), 0)
        self._must_be_utf8 = False
        infos = [self._info(i) for i in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise GgufError(f"{path}: general.alignment is {alignment!r}, expected a power of two; {AGAIN}")
        base = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for info in infos:
            self._place(info, base)
        self._check_overlap()

    # -------------------------------------------------------------- reading

    def _take(self, n: int) -> bytes:
        if n > self.size - self._at:
            raise GgufError(
                f"{self.path}: {self._what} needs bytes {self._at}..{self._at + n}, and the file has {self.size}: "
                f"truncated; {AGAIN}"
            )
        self._at += n
        return self._map[self._at - n : self._at]

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _count(self, name: str, count: int, least_bytes: int) -> None:
        if count * least_bytes > self.size - self._at:
            raise GgufError(
                f"{self.path}: {name} is {count}, and only {self.size - self._at} bytes follow: truncated or corrupt; "
                f"{AGAIN}"
            )

    def _bound(self, name: str, value: int, most: int) -> None:
        if value > most:
            raise GgufError(f"{self.path}: {name} is {value}, expected at most {most}; {AGAIN}")

    def _string(self, most: int = _MAX_TEXT_BYTES) -> str:
        length = self._scalar("<Q")
        self._count(f"{self._what}: string length", length, 1)
        self._bound(f"{self._what}: string length", length, most)
        self._text_bytes += length
        self._bound(f"{self._what}: number of bytes of text up to here", self._text_bytes, _MAX_TEXT_BYTES)
        raw = self._take(length)
        try:
            return raw.decode("utf-8", "strict" if self._must_be_utf8 else "replace")
        except UnicodeDecodeError:
            raise GgufError(
                f"{self.path}: {self._what}: text {raw[:_SHOWN]!r} is not UTF-8, as all tokens are; {AGAIN}"
            ) from None

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 1:
            raise GgufError(f"{self.path}: {self._what}: value type is {kind}, expected 0 to 12; {AGAIN}")
        inner, length = self._scalar("<I"), self._scalar("<Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            self._count(f"{self._what}: array length", length, struct.calcsize(code))
            begin = self._at
            self._at += length * struct.calcsize(code)
            return np.frombuffer(self.data[begin : self._at], np.dtype(code))
        self._count(f"{self._what}: array length", length, 8)
        self._n_entries += length * (_NESTED_ENTRIES if inner == _ARRAY else 1)
        self._bound(f"{self._what}: number of array entries up to here", self._n_entries, _MAX_ENTRIES)
        return [self._value(inner, depth + 1) for _ in range(length)]

    def _info(self, i: int) -> TensorInfo:
        self._what = f"tensor {i}"
        name = self._string(_MAX_NAME)
        self._what = f"tensor {name!r}"
        n_dimensions = self._scalar("<I")
        if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
            raise GgufError(
                f"{self.path}: {self._what}: number of dimensions is {n_dimensions}, expected 1 to {_MAX_DIMENSIONS}; "
                f"{AGAIN}"
            )
        shape = tuple(self._scalar("<Q") for _ in range(n_dimensions))[::-1]
        kind, offset = self._scalar("<I"), self._scalar("<Q")
        if kind not in BY_ID:
            known = ", ".join(f"{f.name} ({f.id})" for f in BY_ID.values())
            raise GgufError(
                f"{self.path}: {self._what}: format is {kind}; supported: {known}; quantize the model to one of them"
            )
        fmt = BY_ID[kind]
        elements = 1
        for n in shape:
            elements *= n
        if not elements or elements > 1 << 48:
            raise GgufError(f"{self.path}: {self._what}: shape is {list(shape)}, expected 1 to 2^48 values; {AGAIN}")
        if shape[-1] % fmt.unit:
            raise GgufError(
                f"{self.path}: {self._what}: row length is {shape[-1]}, expected a multiple of {fmt.unit} for "
                f"{fmt.name}; quantize the model to another format"
            )
        return TensorInfo(name, shape, fmt, offset, elements // fmt.unit * fmt.source_bytes)

    def _place(self, info: TensorInfo, base: int) -> None:
        start = base + info.start
        if start + info.nbytes > self.size:
            raise GgufError(
                f"{self.path}: tensor {info.name!r} needs bytes {start}..{start + info.nbytes}, and the file has "
                f"{self.size}: truncated or corrupt; {AGAIN}"
            )
        if info.name in self.tensors:
            raise GgufError(f"{self.path}: tensor {info.name!r} is listed twice, expected once; {AGAIN}")
        self.tensors[info.name] = info._replace(start=start)

    def _check_overlap(self) -> None:
        """Each byte belongs to one tensor, so a checkpoint is no larger than its source."""
        placed = sorted(self.tensors.values(), key=lambda info: info.start)
        for before, info in pairwise(placed):
            if before.start + before.nbytes > info.start:
                raise GgufError(
                    f"{self.path}: tensor {info.name!r} begins at byte {info.start}, inside {before.name!r}, which "
                    f"ends at {before.start + before.nbytes}; {AGAIN}"
                )

    # -------------------------------------------------------------- use

    def identity(self) -> tuple[int, ...]:
        """What changes when the opened file's bytes may have changed, whatever file its path names by now."""
        info = os.fstat(self._fd)
        return info.st_size, info.st_mtime_ns

    def rows(self, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor, shape (rows, bytes of a row), u8; a view of the mapped file."""
        raw = self.data[info.start : info.start + info.nbytes]
        return raw.reshape(-1, info.shape[-1] // info.format.unit * info.format.source_bytes)

    def release(self, info: TensorInfo) -> None:
        """As `Source.release`; the pages stay in the page cache."""
        first = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = info.start + info.nbytes - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def label(self, name: str) -> str:
        """As `Source.label`."""
        return repr(name)

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the file, past the map: hashing leaves no pages in this process's memory. Raises `OSError`."""
        return os.pread(self._fd, nbytes, at)
