"""Requests made from /openapi.json: the command of each phase, and how its requests are counted."""

from __future__ import annotations

import sys

import pytest

from tools.api_examples import PHASES, command, run_phase


@pytest.mark.parametrize("phase", PHASES)
def test_only_fuzzing_ends_by_time(phase: str) -> None:
    made = command("http://127.0.0.1:1", phase, 60, 15, "^/v1/chat", ("--workers", "2"))
    assert made[1:3] == ["run", "http://127.0.0.1:1/openapi.json"]
    assert made[made.index("--phases") + 1] == phase
    assert made[made.index("--include-path-regex") + 1] == "^/v1/chat"
    assert ("--max-time" in made) == (phase == "fuzzing")
    assert made[-2:] == ["--workers", "2"]


def test_the_requests_of_a_phase_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "print('Test cases:'); print('  1,228 generated, 1,227 passed, 1 failed'); raise SystemExit(1)"
    code, requests, _ = run_phase([sys.executable, "-c", lines])
    assert (code, requests) == (1, 1228)
    assert "1 failed" in capsys.readouterr().out
