"""A stopped server's files are removed; those of a running server are untouched."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.runtime.run_dir import StageLock
from pipeline.supervise.cleanup import sweep


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A run directory and an arena directory as a killed server leaves them."""
    run, arenas = tmp_path / "run", tmp_path / "arenas"
    run.mkdir()
    arenas.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(run / "scheduler-kv.sock"))
    (run / "kv.status").write_text("{}")
    (run / "kv.restarts").write_text("1")
    (run / "kv.lock").touch()
    (run / "worker-m@1.lock").touch()
    (arenas / "model.kv").write_bytes(bytes(4096))
    (arenas / ".model.kv.123").write_bytes(bytes(4096))
    return run, arenas


def test_files_of_a_killed_server_are_removed(places: tuple[Path, Path]) -> None:
    run, arenas = places
    assert sweep(run, arenas) == ""
    assert [path.name for path in run.iterdir()] == ["kv.lock"]
    assert not arenas.exists()
    assert sweep(run, arenas) == ""


def test_arenas_that_were_elsewhere_are_removed_with_the_record_of_their_place(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    """`server.arena_dir` has been set since the killed server recorded it."""
    run, arenas = places
    moved = tmp_path / "home" / arenas.name
    moved.mkdir(parents=True)
    (moved / "model.kv").write_bytes(bytes(4096))
    (run / paths.ARENA_PARENT_FILE).write_bytes(os.fsencode(moved.parent))
    assert sweep(run, arenas) == ""
    assert not moved.exists()
    assert [path.name for path in run.iterdir()] == ["kv.lock"]


def test_a_running_stage_prevents_removal(places: tuple[Path, Path]) -> None:
    run, arenas = places
    before = sorted([*run.iterdir(), *arenas.iterdir()])
    lock = StageLock(run, "kv")
    assert sweep(run, arenas) == "kv"
    assert sorted([*run.iterdir(), *arenas.iterdir()]) == before
    lock.release()
    assert sweep(run, arenas) == ""


def test_it_waits_for_a_stage_that_is_stopping(places: tuple[Path, Path]) -> None:
    run, arenas = places
    lock = StageLock(run, "kv")
    assert sweep(run, arenas, wait_s=60.0, pause=lambda seconds: lock.release()) == ""


def test_one_of_two_concurrent_sweeps_succeeds(places: tuple[Path, Path]) -> None:
    run, arenas = places
    for name in "abcdefgh":
        (run / f"{name}.lock").touch()
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(sweep(run, arenas))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "" in results
    assert not arenas.exists()


def test_the_lock_of_a_running_version_prevents_removal(places: tuple[Path, Path]) -> None:
    run, arenas = places
    lock = StageLock(run, "worker-m@1")
    assert sweep(run, arenas) == "worker-m@1"
    assert arenas.exists()
    lock.release()


def test_a_lock_that_the_worker_pool_removes_meanwhile_is_no_error(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, arenas = places
    real = os.open

    def remove_first(path: os.PathLike[str], flags: int) -> int:
        if Path(path).name == "worker-m@1.lock":
            Path(path).unlink()
        return real(path, flags)

    monkeypatch.setattr(os, "open", remove_first)
    assert sweep(run, arenas) == ""
    assert not arenas.exists()


def test_a_stage_that_starts_during_a_sweep_waits_for_its_end(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing large arenas may take seconds; the stage would find its lock taken, and would not be started again."""
    run, arenas = places
    begun, waits, real, real_flock = threading.Event(), threading.Event(), Path.unlink, fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            waits.set()
        real_flock(fd, operation)

    with ThreadPoolExecutor(1) as pool:
        started = []

        def unlink(path: Path, missing_ok: bool = False) -> None:
            if not begun.is_set():
                begun.set()
                started.append(pool.submit(StageLock, run, "kv"))
                assert waits.wait(60)
                with pytest.raises(TimeoutError):
                    started[0].result(0.2)
            real(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
        monkeypatch.setattr(fcntl, "flock", flock)
        assert sweep(run, arenas) == ""
        lock = started[0].result(60)
    assert sweep(run, arenas) == "kv"
    lock.release()


def test_foreign_files_stay(places: tuple[Path, Path], tmp_path: Path) -> None:
    run, arenas = places
    (run / "notes.sock").write_text("no socket")
    (arenas / "folder").mkdir()
    assert sweep(run, arenas) == ""
    assert (run / "notes.sock").exists()
    assert [path.name for path in arenas.iterdir()] == ["folder"]


def test_a_link_is_not_followed(places: tuple[Path, Path], tmp_path: Path) -> None:
    run, arenas = places
    link = tmp_path / "link"
    link.symlink_to(arenas)
    assert sweep(run, link) == ""
    assert (arenas / "model.kv").exists()


def test_the_last_of_concurrent_sweeps_removes_everything(tmp_path: Path) -> None:
    """Each supervisor sweeps once, right after its stage has ended: one of them must find no stage."""
    run_dir, arenas = tmp_path / "run", tmp_path / "arenas"
    run_dir.mkdir()
    stages = ["gateway", "kv", "scheduler", "tokenizer"]
    start = threading.Barrier(len(stages))

    def end(fd: int) -> str:
        start.wait(60)
        os.close(fd)  # the stage ends, and with it its lock
        return sweep(run_dir, arenas)

    with ThreadPoolExecutor(len(stages)) as threads:
        for _ in range(200):
            arenas.mkdir()
            (arenas / "tiny.kv").touch()
            fds = [os.open(run_dir / f"{stage}.lock", os.O_RDWR | os.O_CREAT) for stage in stages]
            for fd in fds:
                fcntl.flock(fd, fcntl.LOCK_EX)
            assert "" in list(threads.map(end, fds))
            assert not arenas.exists()
