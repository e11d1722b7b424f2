"""`starling logs`: reading, ordering and following log files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from starling.cli.logs import Tail, logs


def line(ts: str, event: str) -> bytes:
    return json.dumps({"ts": ts, "event": event}).encode() + b"\n"


def events(tail: Tail, at_most: int | None = None) -> list[str]:
    return [fields["event"] for _, fields, _ in tail.read(at_most)]


def test_a_tail_follows_lines_and_rotation(tmp_path: Path) -> None:
    path = tmp_path / "kv.log"
    tail = Tail(path)
    assert events(tail) == []
    with path.open("wb", buffering=0) as file:
        file.write(line("1", "a") + line("2", "b") + line("3", "c")[:-5])
        assert events(tail, 1) == ["b"]
        file.write(line("3", "c")[-5:] + b"not ours\n[]\n" + line("4", "d"))
        assert events(tail) == ["c", "d"]
        file.write(line("5", "e"))
    path.rename(tmp_path / "kv.log.1")
    assert events(tail) == ["e"]
    path.write_bytes(line("6", "f"))
    assert events(tail) == ["f"]
    tail.close()


@pytest.mark.parametrize("stage", ["worker", None])
def test_what_the_parent_of_all_worker_groups_says_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str | None
) -> None:
    """When a group has given up, only its parent logs it."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    for number, name in enumerate(("worker", "worker-supervisor", "worker-pool", "kv")):
        line = json.dumps({"ts": f"2026-01-01T00:00:0{number}.000Z", "level": "info", "stage": name, "event": name})
        (tmp_path / "logs" / f"{name}.log").write_text(line + "\n")
    shown = CliRunner().invoke(logs, [stage, "--json"] if stage else ["--json"])
    events = [json.loads(line)["event"] for line in shown.output.splitlines()]
    assert events == ["worker", "worker-supervisor", "worker-pool", *([] if stage else ["kv"])]
