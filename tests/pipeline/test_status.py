"""Status records: contents, frequency, and full disks."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.observe.status import INTERVAL_S, StageStatus, StatusFile, read_all
from pipeline.protocol.messages import Heartbeat


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def beat(progress: int, ready: bool = True) -> Heartbeat:
    return Heartbeat("kv", 1, progress, False, ready)


def the_one(run_dir: Path) -> StageStatus:
    (found,) = read_all(run_dir)
    assert found.alive
    return found


def test_readiness_is_written_at_once_and_progress_at_intervals(tmp_path: Path) -> None:
    clock = Clock()
    file = StatusFile(tmp_path, "kv", clock)
    file.write(beat(1, ready=False))
    file.write(beat(2, ready=False))
    assert the_one(tmp_path).progress == 1
    file.write(beat(3))
    assert (the_one(tmp_path).progress, the_one(tmp_path).ready) == (3, True)
    clock.now += INTERVAL_S
    file.write(beat(4))
    assert the_one(tmp_path).progress == 4


def test_a_failed_write_is_repeated(tmp_path: Path) -> None:
    """Although nothing has changed since: an idle stage would otherwise appear dead."""
    clock, run_dir = Clock(), tmp_path / "run"
    file = StatusFile(run_dir, "kv", clock)
    file.write(beat(7))  # there is no directory: as little can be written as on a full disk
    run_dir.mkdir()
    file.write(beat(7))  # not at every tick
    assert read_all(run_dir) == []
    clock.now += INTERVAL_S
    file.write(beat(7))
    assert the_one(run_dir).progress == 7
    # And again, in the middle of its life.
    shutil.rmtree(run_dir)
    clock.now += INTERVAL_S
    file.write(beat(8, ready=False))
    run_dir.mkdir()
    clock.now += INTERVAL_S
    file.write(beat(8, ready=False))
    assert (the_one(run_dir).progress, the_one(run_dir).ready) == (8, False)
