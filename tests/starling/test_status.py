"""`starling status`: its rows and its table, without a running server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config.load import resolve
from pipeline.observe.status import StageStatus
from starling.cli.status import Row, _row, duration, look, size, table


def test_the_table_fits_80_columns_whatever_the_numbers() -> None:
    large = Row(
        "worker-" + "x" * 40,
        "not running",
        "r" * 10,
        4_194_304,
        1,
        1e8,
        99,
        6400.0,
        1 << 39,
        64,
        1000,
        64,
        True,
        1 << 60,
        1e8,
    )
    lines = list(table([large, Row("kv", "draining")]))
    assert max(len(line) for line in lines) <= 80
    assert lines[1].split()[1] == "4194304"
    assert lines[2] == "  " + "r" * 10
    assert lines[3].split() == ["kv", *"-------", "draining"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (86400 * 3, "3d")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(("count", "shown"), [(2048, "2K"), (3 << 20, "3.0M"), (700 << 20, "700M"), (3 << 29, "1.5G")])
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


def test_a_scheduler_that_is_ready_says_what_waits() -> None:
    """A model that is not ready beside others, and a worker group beside those that compute."""

    def row(stage: str, *, is_ready: bool, reason: str) -> Row:
        pid = os.getpid()
        return _row(StageStatus(stage, pid, 0, 0, 1.0, 0, False, is_ready, reason, 0.0), 1.0, 0.0, [pid])

    reason = "worker-m~1: waiting for its worker"
    assert row("scheduler", is_ready=True, reason=reason).reason == reason
    assert row("scheduler", is_ready=True, reason="").reason == ""
    assert row("kv", is_ready=True, reason="starting").reason == ""
    assert row("kv", is_ready=False, reason="starting").reason == "starting"


def test_a_server_that_is_down_has_rows_but_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    rows = look(resolve({"models": [{"name": "m", "path": "m.gguf"}]}, {}))
    assert [(row.stage, row.state, row.pid) for row in rows] == [
        (name, "not running", None) for name in ("gateway", "tokenizer", "scheduler", "kv", "worker-m")
    ]
