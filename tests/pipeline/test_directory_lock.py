"""Which servers may hold a directory's lock, and what a failing disk does to it."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.runtime import directory_lock
from pipeline.runtime.directory_lock import DirectoryLock

KEY = "server.state_dir"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """The run directories of two servers."""
    found = tmp_path / "run-1", tmp_path / "run-2"
    for path in found:
        path.mkdir()
    return found


def test_the_processes_of_one_server_share_it(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    locks = [DirectoryLock(tmp_path / "state", runs[0], KEY) for _ in range(3)]
    locks[0].release()
    with pytest.raises(ConfigError, match="in use by another server"):
        DirectoryLock(tmp_path / "state", runs[1], KEY)
    joined = DirectoryLock(tmp_path / "state", runs[0], KEY)
    for lock in (*locks, joined):
        lock.release()
    DirectoryLock(tmp_path / "state", runs[1], KEY).release()


def test_the_refusal_names_field_value_holder_and_remedy(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    held = DirectoryLock(tmp_path / "state", runs[0], KEY)
    with pytest.raises(ConfigError) as refusal:
        DirectoryLock(tmp_path / "state", runs[1], KEY)
    held.release()
    message = refusal.value.message
    assert refusal.value.param == KEY
    for part in (KEY, str(tmp_path / "state"), f"pid {os.getpid()}, started 20", str(runs[0]), "starling down"):
        assert part in message


def test_a_killed_holder_releases_it_at_once(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        DirectoryLock(tmp_path / "state", runs[0], KEY)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    with pytest.raises(ConfigError, match=f"pid {pid}, started"):
        DirectoryLock(tmp_path / "state", runs[1], KEY)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    DirectoryLock(tmp_path / "state", runs[1], KEY).release()
    os.close(read)
    os.close(write)


def test_a_disk_that_refuses_the_file_does_not_end_the_stage(
    tmp_path: Path, runs: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    DirectoryLock(tmp_path / "file" / "state", runs[0], KEY).release()
    (line,) = [record for record in caplog.records if record.message == "a directory is used without a lock"]
    assert vars(line)["reason"] == "Not a directory"


def test_a_damaged_file_is_replaced(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    (tmp_path / directory_lock.FILE_NAME).write_bytes(b"\xff" * 100)
    DirectoryLock(tmp_path, runs[0], KEY).release()
    lock = DirectoryLock(tmp_path, runs[1], KEY)
    with pytest.raises(ConfigError, match="in use by another server"):
        DirectoryLock(tmp_path, runs[0], KEY)
    lock.release()


def test_no_process_joins_while_another_one_asks_whether_it_is_held(
    tmp_path: Path, runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find the lock held by no process that it knows, and use the directory without it."""
    state = tmp_path / "state"
    assert not directory_lock.is_held(state)
    held = DirectoryLock(state, runs[0], KEY)
    assert directory_lock.is_held(state)
    held.release()
    flock, may_join = fcntl.flock, []

    def asked(fd: int, operation: int) -> None:
        flock(fd, operation)
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB:
            directory = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
            with pytest.raises(BlockingIOError):
                flock(directory, operation)
            os.close(directory)
            may_join.append(False)

    monkeypatch.setattr(fcntl, "flock", asked)
    assert not directory_lock.is_held(state)
    assert may_join == [False]
