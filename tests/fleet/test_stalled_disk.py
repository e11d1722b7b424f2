"""A disk that does not answer holds up what needs it, and nothing else of an agent.

Files that cannot be read yet stand for it: a FIFO without a writer, whose `open` waits in the kernel.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import stages.agent
from pipeline.blobs.folder import FolderStore
from pipeline.errors import StarlingError
from stages.agent import disk_threads
from stages.agent.downloads.sources import FileSource
from stages.agent.state_file import StateFile, Stored, read_stored
from tests.fleet.test_heartbeat import reporter_of

CALLS = 40  # more than the loop has threads, and more than any purpose has
SHARED_THREADS = 2  # of the loop in these tests

# Functions that wait for no disk: they compute with bytes that they are given.
COMPUTING = {"piece_checksum", "decompress", "read"}

STORED = Stored(agent_id="a", incarnation="b")


class StalledDisk:
    """A file that no call can open before `answer`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._tasks: list[asyncio.Task[Any]] = []

    async def use(self, call: Callable[[], Awaitable[object]]) -> None:
        """Let `CALLS` callers wait for the file."""

        async def wait() -> None:
            with contextlib.suppress(OSError, StarlingError):
                await call()

        self._tasks += [asyncio.create_task(wait()) for _ in range(CALLS)]
        await asyncio.sleep(0)  # each has made its call then

    @property
    def is_waited_for(self) -> bool:
        """Whether all callers still wait."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def answer(self) -> None:
        """Let all calls end: each finds an empty file."""
        fifo = os.open(self.path, os.O_PATH)
        self.path.unlink()
        self.path.touch()
        while not all(task.done() for task in self._tasks):
            # A thread that has found the FIFO may open it after that, and waits for a further writer.
            os.close(os.open(f"/proc/self/fd/{fifo}", os.O_RDWR))
            await asyncio.wait(self._tasks, timeout=0.01)
        os.close(fifo)


@pytest.fixture
async def shared() -> None:
    """The loop's own threads, few as on a small machine."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(SHARED_THREADS))


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[StalledDisk]:
    found = StalledDisk(tmp_path / "file")
    yield found
    await found.answer()


async def others_go_on(tmp_path: Path) -> None:
    """Look-ups of names, heartbeats with a look at the disk, and the state file."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        assert await loop.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
        reporter = reporter_of([], lambda: 0.0, patience_s=60)
        reporter._look = lambda: ((), 5, "")  # type: ignore[method-assign]
        assert (await reporter.report()).disk_free == 5
        await StateFile(tmp_path, STORED, lambda: ("m",)).store()
    found = read_stored(tmp_path / "agent.json")
    assert found is not None and found.models == ("m",)


async def test_files_of_models_hold_up_nothing_else(tmp_path: Path, shared: None, disk: StalledDisk) -> None:
    await disk.use(lambda: FileSource(disk.path).read(0, 1))
    await others_go_on(tmp_path)
    assert disk.is_waited_for


async def test_a_folder_of_blobs_holds_up_nothing_else(tmp_path: Path, shared: None, disk: StalledDisk) -> None:
    store, other = FolderStore(tmp_path), FolderStore(tmp_path)
    (tmp_path / "whole").write_bytes(b"x")
    await disk.use(lambda: store.get("file", 0, 1))
    await others_go_on(tmp_path)
    assert disk.is_waited_for
    async with asyncio.timeout(60):  # such as a mirror on another disk
        assert await other.get("whole", 0, 1) == b"x"
    await store.close()
    await other.close()


@pytest.mark.parametrize("name", disk_threads.__all__)
async def test_no_purpose_takes_threads_of_another(tmp_path: Path, shared: None, disk: StalledDisk, name: str) -> None:
    stalled = getattr(disk_threads, name)
    await disk.use(lambda: stalled.run(disk.path.read_bytes))
    async with asyncio.timeout(60):
        for other in set(disk_threads.__all__) - {name}:
            assert await getattr(disk_threads, other).run(max, 1, 2) == 2
        assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
    assert disk.is_waited_for


def test_only_what_computes_runs_in_the_threads_of_the_loop() -> None:
    """Else a disk that does not answer takes them from look-ups of names."""
    found = []
    root = Path(stages.agent.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called.endswith("run_in_executor"):
                is_shared, function = ast.unparse(node.args[0]) == "None", node.args[1]
            else:
                is_shared, function = called in ("asyncio.to_thread", "uninterrupted"), next(iter(node.args), node)
            if is_shared and ast.unparse(function) not in COMPUTING:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
