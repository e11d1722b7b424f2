"""Complete writes: all bytes are written, or the file is as before."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeline import files
from pipeline.files import DurableFile, append_all, begin_writeback, replace_file, temporary_path, write_all
from pipeline.runtime.process import open_rename_watch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    return path


def at_most(monkeypatch: pytest.MonkeyPatch, nbytes: int, calls: int) -> None:
    """The kernel takes so little at a time, and after so many times nothing."""
    write, left = os.pwrite, [calls]

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return write(fd, data[:nbytes], at)

    monkeypatch.setattr(os, "pwrite", pwrite)


def test_partial_writes_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_most(monkeypatch, 3, 4)
    with open(path, "r+b") as file:
        write_all(file.fileno(), b"0123456789", 4)
    assert path.read_bytes() == b"befo0123456789"


def test_a_failed_append_is_truncated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_most(monkeypatch, 3, 2)
    with open(path, "r+b") as file, pytest.raises(OSError, match="No space left"):
        append_all(file.fileno(), b"0123456789", 6)
    assert path.read_bytes() == b"before"


def test_written_bytes_are_synchronized_once(path: Path) -> None:
    file = DurableFile(os.open(path, os.O_RDWR))
    assert file.unsynced() is None
    file._is_dirty = True
    fd = file.unsynced()
    assert fd is not None
    os.fdatasync(fd)
    os.close(fd)
    assert file.unsynced() is None
    file._is_dirty = True
    file.close()
    file.close()
    assert file.unsynced() is None


def test_a_writeback_that_is_begun_early_changes_nothing_and_never_fails(path: Path) -> None:
    with open(path, "r+b") as file:
        write_all(file.fileno(), b"0123456789", 4)
        for offset in (0, 1 << 40):  # beyond the end, and beyond 32 bits
            begin_writeback(file.fileno(), offset, 8 << 20)
        assert path.read_bytes() == b"befo0123456789"
    reading, writing = os.pipe()
    begin_writeback(writing, 0, 1)  # no file of a disk
    os.close(reading)
    os.close(writing)
    begin_writeback(writing, 0, 1)  # closed


def test_a_file_of_one_run_is_replaced_whole(path: Path) -> None:
    """Who has the old one open reads that to its end; who watches the directory sees the change."""
    watch = open_rename_watch(path.parent)
    with path.open("rb") as old:
        replace_file(path, b"after", of_run=True)
        assert os.read(watch, 4096)
        temporary_path(path).write_bytes(b"left by a killed writer")
        replace_file(path, b"later", of_run=True)
        assert old.read() == b"before"
    os.close(watch)
    assert path.read_bytes() == b"later"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("is_supported", [True, False])
def test_a_file_of_one_run_is_made(path: Path, monkeypatch: pytest.MonkeyPatch, is_supported: bool) -> None:
    """There is nothing to exchange it with; or the system cannot exchange files."""
    if is_supported:
        path.unlink()
    else:
        monkeypatch.setattr(files, "_renameat2", None)
    replace_file(path, b"after", of_run=True)
    assert path.read_bytes() == b"after"
    assert list(path.parent.iterdir()) == [path]
