"""Arrays in one run of bytes, which can be mapped and used where they are.

    u32 little-endian   length of the directory
    directory           msgpack: for each array its name, NumPy type, length, and place behind the directory
    arrays              one-dimensional, each 64-byte aligned if the run is

A reader gets views. Independent of what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from shm.arena import align

_ALIGNMENT = 64
_TYPES = {"|u1", "<u4", "<i4", "<i8", "<u8", "<f4"}


class _Entry(msgspec.Struct, array_like=True):
    name: str
    type: str
    length: int
    offset: int  # from the first array, bytes


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the arrays as one run of bytes; none as no bytes."""
    if not arrays:
        return b""
    entries, at = [], 0
    for name, array in arrays.items():
        at = align(at, _ALIGNMENT)
        entries.append(_Entry(name, array.dtype.str, array.size, at))
        at += array.nbytes
    directory = msgspec.msgpack.encode(entries)
    base = align(4 + len(directory), _ALIGNMENT)
    packed = bytearray(base + at)
    packed[:4] = len(directory).to_bytes(4, "little")
    packed[4 : 4 + len(directory)] = directory
    for entry, array in zip(entries, arrays.values(), strict=True):
        packed[base + entry.offset : base + entry.offset + array.nbytes] = array.tobytes()
    return bytes(packed)


def unpack(data: memoryview) -> dict[str, np.ndarray]:
    """Return the arrays by name, views if they are aligned. Raises `ValueError` for other bytes."""
    if not len(data):
        return {}
    length = int.from_bytes(data[:4], "little")
    entries = msgspec.msgpack.decode(data[4 : 4 + length], type=list[_Entry])
    base = align(4 + length, _ALIGNMENT)
    found: dict[str, Any] = {}
    for entry in entries:
        if entry.type not in _TYPES or entry.length < 0 or entry.offset < 0:
            raise ValueError(f"array {entry.name!r} is of type {entry.type!r}, length {entry.length}")
        begin, kind = base + entry.offset, np.dtype(entry.type)
        if begin + entry.length * kind.itemsize > len(data):
            raise ValueError(f"array {entry.name!r} has {entry.length} values at byte {begin} of {len(data)}")
        array = np.frombuffer(data, kind, entry.length, begin)
        found[entry.name] = array if array.flags.aligned else array.copy()
    return found
