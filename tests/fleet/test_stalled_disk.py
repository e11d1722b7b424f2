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

# Calls in the threads of the loop that wait for no disk: they compute with bytes that they are given.
COMPUTING = {
    "downloads/model.py: piece_checksum",
    "downloads/transfer.py: piece_checksum",
    "engines/door/door.py: decompress",
    "engines/door/door.py: read",  # request_body.py: the body of a request
}
# What runs a function in them, by its whole name.
SHARED = {"asyncio.to_thread", "asyncio.threads.to_thread", "pipeline.threads.uninterrupted"}

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


def calls_in_shared_threads(source: str) -> list[str]:
    """The functions that run in the threads of the loop, and the statements that hide such a function."""
    tree = ast.parse(source)
    names: dict[str, str] = {}  # the whole name of each imported one
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.asname or one.name.split(".")[0]: one.name if one.asname else "" for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}

    def whole(node: ast.AST) -> str:
        first, _, rest = ast.unparse(node).partition(".")
        known = names.get(first, "") or first
        return f"{known}.{rest}" if rest else known

    found, called = [], set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "run_in_executor":
            if ast.unparse(node.args[0]) == "None":
                found.append(ast.unparse(node.args[1]))
        elif whole(node.func) in SHARED:
            called.add(node.func)
            found.append(ast.unparse(node.args[0]))
    for node in ast.walk(tree):  # under another name, or passed on
        if isinstance(node, ast.Name | ast.Attribute) and node not in called and whole(node) in SHARED:
            found.append(f"{ast.unparse(node)} in line {node.lineno}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "from pipeline.threads import uninterrupted as away\naway(read)",
        "import pipeline.threads\npipeline.threads.uninterrupted(read)",
        "from pipeline import threads\nthreads.uninterrupted(read)",
        "import asyncio as loops\nloops.to_thread(read, 1)",
        "from asyncio import to_thread\nto_thread(read)",
        "import asyncio\nasyncio.get_running_loop().run_in_executor(None, read)",
    ],
)
def test_calls_in_shared_threads_are_found_under_each_name(source: str) -> None:
    assert calls_in_shared_threads(source) == ["read"]


def test_a_function_that_is_called_under_another_name_is_found() -> None:
    source = "import asyncio\nfrom stages.agent.disk_threads import MODELS\naway = asyncio.to_thread\nMODELS.run(read)"
    assert calls_in_shared_threads(source) == ["asyncio.to_thread in line 3"]


def test_only_what_computes_runs_in_the_threads_of_the_loop() -> None:
    """Else a disk that does not answer takes them from look-ups of names."""
    root = Path(stages.agent.__file__).parent
    found = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        for name in calls_in_shared_threads(path.read_text())
    }
    assert found == COMPUTING
