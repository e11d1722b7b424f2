"""A fork that waits for work gets copies of the pages that an earlier fork of its parent has written to."""

from __future__ import annotations

import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.runtime import written_pages
from pipeline.runtime.written_pages import NO_PAGES, Pages, copy_pages, written_by

N_PAGES = 1000
WRITTEN = range(100, 900, 2)  # pages that a fork writes to: each is a range of its own


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """Private memory of this process, which its forks share until they write to it."""
    memory = mmap.mmap(-1, N_PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(N_PAGES):
        memory[page * mmap.PAGESIZE] = 1
    yield memory
    memory.close()


def write(memory: mmap.mmap) -> int:
    """The page faults that it takes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in WRITTEN:
        memory[page * mmap.PAGESIZE] = 2
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def in_fork(body: Callable[[], int]) -> int:
    """What `body` returns in a fork of this process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, str(body()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    found = os.read(reader, 100)
    os.close(reader)
    os.waitpid(pid, 0)
    return int(found)


@pytest.fixture
def written(memory: mmap.mmap) -> Iterator[Pages]:
    """What a fork that runs has written to."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        write(memory)
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    try:
        found = written_by(pid)
        if not found.ranges:
            pytest.skip("this machine does not say which pages a process has")
        yield found
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def needs_populate() -> None:
    release = os.uname().release.split(".")
    if (int(release[0]), int(release[1])) < (5, 14):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")


def test_a_later_fork_copies_no_page_when_it_writes(memory: mmap.mmap, written: Pages) -> None:
    needs_populate()

    def body() -> int:
        copy_pages(written)
        return write(memory)

    assert in_fork(lambda: write(memory)) >= len(WRITTEN)
    assert in_fork(body) < len(WRITTEN) // 10
    assert all(memory[page * mmap.PAGESIZE] == 1 for page in WRITTEN)  # copies: this process has what it had


def test_no_more_pages_are_copied_than_allowed(
    memory: mmap.mmap, written: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_populate()
    monkeypatch.setattr(written_pages, "MAX_PAGES", 10)

    def body() -> int:
        copy_pages(written)
        return write(memory)

    assert in_fork(body) >= len(WRITTEN) - 10


def test_pages_of_another_program_are_not_copied(memory: mmap.mmap, written: Pages) -> None:
    """Its addresses mean nothing here."""
    other = written._replace(heap=written.heap + mmap.PAGESIZE)

    def body() -> int:
        copy_pages(other)
        return write(memory)

    assert in_fork(body) >= len(WRITTEN)


def test_a_process_that_has_ended_has_written_nothing() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert written_by(pid) == NO_PAGES
    copy_pages(NO_PAGES)


def test_a_map_that_is_very_large_is_not_looked_at(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_pages, "MAX_MAP_BYTES", 0)
    assert written_by(os.getpid()).ranges == []
    assert Path(f"/proc/{os.getpid()}/pagemap").exists()
