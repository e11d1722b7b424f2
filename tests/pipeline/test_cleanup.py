"""A stopped server's files are removed; those of a running server are untouched."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

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
    (run / "kv.lock").touch()
    (arenas / "model.kv").write_bytes(bytes(4096))
    (arenas / ".model.kv.123").write_bytes(bytes(4096))
    return run, arenas


def test_files_of_a_killed_server_are_removed(places: tuple[Path, Path]) -> None:
    run, arenas = places
    assert sweep(run, arenas) == ""
    assert [path.name for path in run.iterdir()] == ["kv.lock"]
    assert not arenas.exists()
    assert sweep(run, arenas) == ""


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
