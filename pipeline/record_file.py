"""Records with length and checksum, appended to a file: what a crash has cut short is recognised and dropped.

    record   length u32, kind u32, XXH3-64 u64, payload (length bytes); little-endian

The checksum covers the payload, or length, kind and payload, depending on the file's `RecordFormat`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from pipeline.files import append_all

_HEAD = struct.Struct("<IIQ")
_CHECKED_HEAD = struct.Struct("<II")  # length and kind, as far as the checksum covers them
RECORD_HEAD_BYTES = _HEAD.size
assert RECORD_HEAD_BYTES == 16


class Record(NamedTuple):
    """A sound record of a file: `begin` and `end` are its byte offsets."""

    kind: int
    payload: bytes
    begin: int
    end: int


class RecordFormat(NamedTuple):
    """Framing of one kind of file."""

    is_head_checked: bool  # whether the checksum covers length and kind

    def encode(self, kind: int, payload: bytes) -> bytes:
        """Return the bytes of a record."""
        return _HEAD.pack(len(payload), kind, self._checksum(kind, payload)) + payload

    def decode(self, raw: bytes, begin: int = 0) -> Iterator[Record]:
        """Yield the records from byte `begin` on, up to the first damage."""
        while begin + _HEAD.size <= len(raw):
            length, kind, checksum = _HEAD.unpack_from(raw, begin)
            end = begin + _HEAD.size + length
            payload = raw[begin + _HEAD.size : end]
            if end > len(raw) or self._checksum(kind, payload) != checksum:
                return
            yield Record(kind, payload, begin, end)
            begin = end

    def append(self, fd: int, size: int, kind: int, payload: bytes) -> None:
        """Append a record to a file of `size` bytes. Raises `OSError`: then the file is as before.

        A disk that refuses to truncate as well may keep a part: pass the same `size` to the next `append`.
        """
        append_all(fd, self.encode(kind, payload), size)

    def _checksum(self, kind: int, payload: bytes) -> int:
        head = _CHECKED_HEAD.pack(len(payload), kind) if self.is_head_checked else b""
        return xxhash.xxh3_64_intdigest(head + payload)


PAYLOAD_CHECKED = RecordFormat(is_head_checked=False)
HEAD_CHECKED = RecordFormat(is_head_checked=True)
