"""Which server a command uses: one that runs here, also while its gateway does not."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.errors import ModelUnavailable
from pipeline.observe.status import StageStatus
from pipeline.runtime import run_dir as rundir
from shm.arena import process_ticks
from starling.cli import server_use
from starling.cli.server_use import ServerUse, is_running


def record(run_dir: Path, stage: str, *, is_alive: bool) -> None:
    """Of this process, or of one that has ended."""
    ticks = process_ticks(os.getpid()) if is_alive else 1
    found = StageStatus(stage, os.getpid(), ticks, 1, 1.0, 0, False, True, "", 1.0)
    (run_dir / f"{stage}.status").write_bytes(msgspec.json.encode(found))


def use_of(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ServerUse:
    """Of a server that a command must not start."""
    use = ServerUse(resolve({"server": {"run_dir": str(run_dir)}}, {}), "m")
    monkeypatch.setattr(use, "_start", lambda: pytest.fail("a second server was started"))
    monkeypatch.setattr(server_use, "POLL_S", 0.001)
    return use


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_server_whose_gateway_starts_again_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Under systemd or honcho, where no `starling up` runs. What ends in order removes its record."""
    run_dir = rundir.prepare(tmp_path / "run")
    record(run_dir, "kv", is_alive=True)
    if is_killed:
        record(run_dir, "gateway", is_alive=False)
    use, asked = use_of(run_dir, monkeypatch), list[bool]()

    def answers() -> bool:
        asked.append(is_running(run_dir))
        return len(asked) == 3

    monkeypatch.setattr(use, "_answers", answers)
    with use:
        assert asked == [True] * 3
    assert not use.started


def test_a_gateway_that_does_not_come_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = rundir.prepare(tmp_path / "run")
    record(run_dir, "kv", is_alive=True)
    monkeypatch.setattr(server_use, "GATEWAY_S", 0.01)
    with pytest.raises(ModelUnavailable, match="and no gateway for 0.01 s"), use_of(run_dir, monkeypatch):
        pass


def test_what_a_crash_left_is_no_server(tmp_path: Path) -> None:
    run_dir = rundir.prepare(tmp_path / "run")
    assert not is_running(run_dir)
    for stage in ("kv", "gateway"):
        record(run_dir, stage, is_alive=False)
    assert not is_running(run_dir)
