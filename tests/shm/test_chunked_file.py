"""Writes in whole chunks: the bytes, the calls, what is said to be written, and the huge pages that come of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm import chunked_file, huge_pages
from shm.chunked_file import ChunkedFile
from shm.huge_pages import HUGE_BYTES

CHUNK = 64


class Calls(io.BytesIO):
    """Keeps where each call wrote, and takes at most `most` bytes of one."""

    def __init__(self, content: bytes, most: int) -> None:
        super().__init__(content)
        self.seek(0, io.SEEK_END)
        self.most = most
        self.places: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        begin = self.tell()
        n = super().write(data[: self.most])
        self.places.append((begin, begin + len(data)))
        return n


@given(
    begun=st.binary(max_size=3 * CHUNK),
    parts=st.lists(st.one_of(st.none(), st.binary(max_size=3 * CHUNK)), max_size=12),
    most=st.integers(1, 2 * CHUNK),
)
def test_the_file_has_all_bytes_and_calls_write_up_to_the_end_of_a_chunk(
    begun: bytes, parts: list[bytes | None], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_file, "CHUNK_BYTES", CHUNK)
        file = Calls(begun, most)
        out, expected = ChunkedFile(file, len(begun)), begun
        for part in parts:
            n_calls = len(file.places)
            if part is None:
                out.flush()
                assert out.written == len(expected)
            else:
                out.append(memoryview(part))
                expected += part
                assert all(end % CHUNK == 0 for _, end in file.places[n_calls:])
            assert out.end == len(expected)
            assert out.end - out.written < CHUNK
            assert file.getvalue() == expected[: out.written]
        out.flush()
        assert file.getvalue() == expected


def test_what_is_written_in_chunks_is_mapped_in_huge_pages(tmp_path: Path) -> None:
    if not huge_pages.is_mapped_from(tmp_path):
        pytest.skip("this file system has no huge pages")
    content = np.random.default_rng(1).integers(0, 256, 3 * HUGE_BYTES + 5000, np.uint8).tobytes()
    found = []
    for name in ("chunks", "lines"):
        path = tmp_path / name
        with path.open("wb", buffering=0) as file:
            out = ChunkedFile(file, 0)
            for at in range(0, len(content), 4321):
                part = memoryview(content)[at : at + 4321]
                if name == "chunks":
                    out.append(part)
                else:
                    file.write(part)
            out.flush()
        with path.open("rb") as file:
            data = np.frombuffer(huge_pages.map_to_read(file.fileno(), len(content)), np.uint8)
        assert data.tobytes() == content  # reads all of it
        found.append(huge_pages.mapped_in_huge_pages(data))
    assert found == [3 * HUGE_BYTES, 0]
