"""Arrays in one run of bytes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shm.packed_arrays import pack, unpack

ARRAYS = {
    "bytes": np.arange(7, dtype=np.uint8),
    "none": np.zeros(0, np.int32),
    "keys": np.array([1 << 63, 5], np.uint64),
    "weights": np.array([-1, 1 << 40], np.int64),
    "ends": np.array([3, 4], "<u4"),
    "scores": np.array([-0.5, 2.0], "<f4"),
}


def test_arrays_come_back_as_views_of_aligned_places() -> None:
    data = pack(ARRAYS)
    found = unpack(memoryview(data))
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()
        assert not found[name].flags.owndata
    begin = np.frombuffer(data, np.uint8).ctypes.data
    assert (found["keys"].ctypes.data - begin) % 64 == 0
    assert unpack(memoryview(pack({}))) == {}


def test_other_bytes_are_refused() -> None:
    data = pack(ARRAYS)
    for damaged in (data[:-30], b"\xff" * 40, data.replace(b"<u8", b"|O8")):
        with pytest.raises((ValueError, msgspec.DecodeError)):
            unpack(memoryview(damaged))
