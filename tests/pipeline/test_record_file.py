"""Records with length and checksum: round trips, damage at any byte, and the bytes themselves."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pipeline.record_file import HEAD_CHECKED, PAYLOAD_CHECKED, RecordFormat

FORMATS = [PAYLOAD_CHECKED, HEAD_CHECKED]
records = st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=40)), min_size=1, max_size=5)


def test_the_bytes_are_as_drawn() -> None:
    head = (3).to_bytes(4, "little") + (2).to_bytes(4, "little")
    for record_format, checked in ((PAYLOAD_CHECKED, b"abc"), (HEAD_CHECKED, head + b"abc")):
        checksum = xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little")
        assert record_format.encode(2, b"abc") == head + checksum + b"abc"


@pytest.mark.parametrize("record_format", FORMATS)
@given(records=records, cut=st.integers(0, 300), flip=st.none() | st.integers(0, 300))
def test_decoding_ends_at_the_first_damage(
    record_format: RecordFormat, records: list[tuple[int, bytes]], cut: int, flip: int | None
) -> None:
    raw = bytearray(b"magic" + b"".join(record_format.encode(kind, payload) for kind, payload in records))
    if flip is not None:
        flip = 5 + flip % (len(raw) - 5)
        raw[flip] ^= 1
    intact = min(cut, len(raw) if flip is None else flip)
    found = list(record_format.decode(bytes(raw[:cut]), 5))
    # A flipped bit in a kind is found only if the checksum covers it.
    n_sound = sum(record.end <= intact for record in found)
    assert [(record.kind, record.payload) for record in found[:n_sound]] == records[:n_sound]
    if record_format is HEAD_CHECKED:
        assert n_sound == len(found)


@pytest.mark.parametrize("record_format", FORMATS)
def test_a_full_disk_leaves_the_file_as_before(tmp_path: Path, record_format: RecordFormat) -> None:
    path = tmp_path / "records"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    record_format.append(fd, 0, 1, b"first")
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError):
            record_format.append(fd, len(before), 1, b"second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(fd)
    assert path.read_bytes() == before
