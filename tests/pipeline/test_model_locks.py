"""Locks of the models directory exclude each other and leave no files, also when a holder or a waiter is killed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models import store
from pipeline.models.collect import collect
from pipeline.models.locks import is_locked, lock, remove_unheld
from stages.agent.downloads.model import locked

PROCESSES, ROUNDS, DIGEST = 4, 150, "0123456789abcdef" * 4
WAIT_S = 120
# Adds to a number in a file with the lock held, by the way that its first argument names, so often.
PROGRAM = f"""
import asyncio, os, sys
from pathlib import Path
from pipeline.models.locks import lock
from stages.agent.downloads.model import locked

way, folder, number = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
inside = number.with_name("inside")

def add():
    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
    number.write_text(str(int(number.read_text()) + 1))
    inside.unlink()

async def add_in_turn():
    async with locked(folder, "{DIGEST}", lambda s: asyncio.sleep(0.001)):
        add()

print("ready", flush=True)
sys.stdin.readline()
for _ in range({ROUNDS}):
    if way == "agent":
        asyncio.run(add_in_turn())
    else:
        with lock(folder, "pull-{DIGEST[:16]}"):
            add()
"""
HOLDER = """
import sys
from pathlib import Path
from pipeline.models.locks import lock
with lock(Path(sys.argv[1]), "pull-x"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def expect(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], WAIT_S)[0]
    assert process.stdout.readline() == line + "\n"


def locks_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*.lock"))


def test_a_model_that_does_not_exist_leaves_no_file(tmp_path: Path) -> None:
    for number in range(3):
        with pytest.raises(ConfigError, match="was not pulled"):
            store.fetch(ModelConfig(name=f"unknown-{number}"), tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_released_lock_leaves_no_file(tmp_path: Path) -> None:
    with lock(tmp_path, "fetch-m"):
        assert locks_of(tmp_path) == [".fetch-m.lock"]
        assert is_locked(tmp_path / ".fetch-m.lock")
    assert locks_of(tmp_path) == []
    assert not is_locked(tmp_path / ".fetch-m.lock")


@pytest.mark.parametrize("ways", [["store"] * PROCESSES, ["agent", "store"] * (PROCESSES // 2)])
def test_processes_exclude_each_other_although_files_are_removed(tmp_path: Path, ways: list[str]) -> None:
    folder, number = tmp_path / "models", tmp_path / "number"
    number.write_text("0")
    processes = [start(PROGRAM, way, folder, number) for way in ways]
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        for process in processes:
            expect(process, "ready")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.close()
        assert [process.wait(WAIT_S) for process in processes] == [0] * PROCESSES
    assert number.read_text() == str(PROCESSES * ROUNDS)
    assert locks_of(folder) == []


def test_what_a_killed_holder_leaves_is_removed_by_the_next_one_or_collected(tmp_path: Path) -> None:
    for next_one in ("lock", "collect"):
        with start(HOLDER, tmp_path) as holder:
            expect(holder, "held")
            assert is_locked(tmp_path / ".pull-x.lock")
            collect(tmp_path, (), is_dry=False)
            assert locks_of(tmp_path) == [".pull-x.lock"], "it is held"
            holder.send_signal(signal.SIGKILL)
            holder.wait(WAIT_S)
        assert locks_of(tmp_path) == [".pull-x.lock"]
        if next_one == "lock":
            with lock(tmp_path, "pull-x"):
                pass
        else:
            collect(tmp_path, (), is_dry=True)
            assert locks_of(tmp_path) == [".pull-x.lock"]
            collect(tmp_path, (), is_dry=False)
        assert locks_of(tmp_path) == []


def test_a_lock_that_is_removed_while_it_is_held_is_not_another_holders(tmp_path: Path) -> None:
    """Such as by a user: the first holder must not remove the file of the second one."""
    path = tmp_path / ".fetch-m.lock"
    with lock(tmp_path, "fetch-m"):
        path.unlink()
        with lock(tmp_path, "fetch-m"):
            other = os.stat(path).st_ino
            assert remove_unheld(tmp_path) == []
            assert os.stat(path).st_ino == other
        path.touch()
        other = os.stat(path).st_ino
    assert os.stat(path).st_ino == other
    assert remove_unheld(tmp_path) == [path]


def test_an_error_of_a_lock_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of a file system that has no locks, or has no more of them."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    async def hold() -> None:
        async with locked(tmp_path, "0" * 64, asyncio.sleep):
            pass

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(OSError, match="[Ll]ock"):
            asyncio.run(hold())
    assert os.listdir("/proc/self/fd") == before
    asyncio.run(hold())
    assert os.listdir("/proc/self/fd") == before
