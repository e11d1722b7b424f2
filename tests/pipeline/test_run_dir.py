"""What the run directory and addresses may be, and what a crash leaves in it."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import stat
from pathlib import Path

import pytest

from pipeline.config import addresses
from pipeline.errors import ConfigError, ResourceError
from pipeline.runtime import run_dir


def test_it_is_created_private(tmp_path: Path) -> None:
    made = run_dir.prepare(tmp_path / "a" / "run")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert run_dir.prepare(made) == made


def test_a_directory_accessible_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 750.*chmod 700"):
        run_dir.prepare(tmp_path)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(ConfigError, match="belongs to user .* runs as 4242: set server.run_dir") as refusal:
        run_dir.prepare(tmp_path)
    assert refusal.value.param == "server.run_dir"


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="File exists"):
        run_dir.prepare(tmp_path / "run")


@pytest.mark.parametrize(
    "address", ["ipc:///run/user/1/x.sock", "tcp://127.0.0.1:5555", "tcp://localhost:1", "tcp://[::1]:65535"]
)
def test_valid_addresses_are_accepted(address: str) -> None:
    addresses.check_address(address)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("ipc://relative.sock", "must be absolute"),
        ("ipc:///" + "x" * 106, "107 bytes.*106"),
        ("tcp://192.0.2.1:5555", "not a loopback address"),
        ("tcp://example.org:5555", "not a loopback address"),
        ("tcp://*:5555", "not a loopback address"),
        ("tcp://127.0.0.1", "expected"),
        ("tcp://127.0.0.1:0", "expected"),
        ("tcp://127.0.0.1:70000", "expected"),
        ("udp://127.0.0.1:1", "expected"),
        ("", "expected"),
    ],
)
def test_invalid_addresses_are_refused(address: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        addresses.check_address(address)


def test_other_hosts_only_when_allowed() -> None:
    addresses.check_address("tcp://192.0.2.1:5555", allow_remote=True)


def test_a_dead_socket_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    address = f"ipc://{path}"
    run_dir.clear_socket(address)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        with pytest.raises(ConfigError, match="in use by a live process"):
            run_dir.clear_socket(address)
    assert path.exists()
    run_dir.clear_socket(address)
    assert not path.exists()


def test_other_files_are_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        run_dir.clear_socket(f"ipc://{path}")
    assert path.read_text() == "precious"
    link = tmp_path / "link.sock"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="is not a socket"):
        run_dir.clear_socket(f"ipc://{link}")


def test_a_stage_runs_once(tmp_path: Path) -> None:
    lock = run_dir.StageLock(tmp_path, "kv")
    with pytest.raises(ConfigError, match=rf"kv already runs .*pid {os.getpid()}"):
        run_dir.StageLock(tmp_path, "kv")
    run_dir.StageLock(tmp_path, "gateway").release()
    lock.release()
    lock.release()
    run_dir.StageLock(tmp_path, "kv").release()


@pytest.mark.parametrize("makes_a_new_one", [False, True])
def test_a_lock_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes_a_new_one: bool
) -> None:
    """The worker pool and the last supervisor remove lock files; a lock on a removed file would exclude no process."""
    real = fcntl.flock
    path = tmp_path / "worker-m.lock"

    def remove_first(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:  # not that of the directory
            monkeypatch.setattr(fcntl, "flock", real)
            path.unlink()
            if makes_a_new_one:
                path.touch()
        real(fd, operation)

    lock = run_dir.StageLock(tmp_path, "worker-m")
    lock.release()
    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = run_dir.StageLock(tmp_path, "worker-m")
    with pytest.raises(ConfigError, match=rf"worker-m already runs .*pid {os.getpid()}"):
        run_dir.StageLock(tmp_path, "worker-m")
    assert run_dir.lock_holder(tmp_path, "worker-m") == os.getpid()
    lock.release()


def test_a_full_disk_does_not_prevent_the_lock(tmp_path: Path) -> None:
    """A real limit: no file of this process may grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        lock = run_dir.StageLock(tmp_path, "kv")
        with pytest.raises(ConfigError, match=r"stage kv already runs .*\(pid unknown\)"):
            run_dir.StageLock(tmp_path, "kv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    lock.release()
    run_dir.StageLock(tmp_path, "kv").release()


def test_a_missing_directory_prevents_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"kv.lock cannot be made: .*server.run_dir"):
        run_dir.StageLock(tmp_path / "gone", "kv")


def can_lock(directory: Path, operation: int) -> bool:
    """Whether a process that locks the directory would not have to wait."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def test_no_stage_starts_while_a_process_asks_for_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be refused: who asks holds the lock for a moment."""
    run_dir.StageLock(tmp_path, "up").release()
    flock, may_start = fcntl.flock, []

    def asked(fd: int, operation: int) -> None:
        flock(fd, operation)
        if operation == fcntl.LOCK_SH | fcntl.LOCK_NB:
            monkeypatch.setattr(fcntl, "flock", flock)
            may_start.append(can_lock(tmp_path, fcntl.LOCK_SH))
            monkeypatch.setattr(fcntl, "flock", asked)

    monkeypatch.setattr(fcntl, "flock", asked)
    assert run_dir.lock_holder(tmp_path, "up") == 0
    assert may_start == [False]
    monkeypatch.setattr(fcntl, "flock", flock)
    run_dir.StageLock(tmp_path, "up").release()


def test_the_holder_of_a_lock_is_named_before_a_process_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the pid of the last holder, or none, until it is written."""
    pwrite, may_ask = os.pwrite, []

    def write(fd: int, data: bytes, at: int) -> int:
        may_ask.append(can_lock(tmp_path, fcntl.LOCK_EX))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    lock = run_dir.StageLock(tmp_path, "up")
    assert may_ask == [False]
    assert run_dir.lock_holder(tmp_path, "up") == os.getpid()
    lock.release()
