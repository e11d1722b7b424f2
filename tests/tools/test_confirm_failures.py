"""Tests that failed once are run again: what fails alone has failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.confirm_failures import MOST, TIMES, failed_tests

ROOT = Path(__file__).resolve().parents[2]

# Each test counts its runs in a file, and fails at those that its name ends with.
MODULE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", {names!r})
def test_run(name):
    runs = Path(__file__).with_name(f"{{name}}.runs")
    runs.write_text((runs.read_text() if runs.exists() else "") + ".")
    assert str(len(runs.read_text())) not in name.rpartition("-")[2]
"""


def run(folder: Path, *names: str) -> tuple[int, str]:
    """A run of these tests, of which some fail, then the confirmation: its exit code and output."""
    (folder / "test_some.py").write_text(MODULE.format(names=names))
    options = ["-c", "/dev/null", f"--rootdir={folder}"]
    first = [sys.executable, "-m", "pytest", "-q", *options, "-o", f"cache_dir={folder}/cache", "test_some.py"]
    assert subprocess.run(first, cwd=folder, capture_output=True, check=False).returncode == 1
    second = [sys.executable, "-m", "tools.confirm_failures", f"{folder}/cache", *options]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(second, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def runs_of(folder: Path, name: str) -> int:
    return len((folder / f"{name}.runs").read_text())


def test_a_test_that_passes_alone_is_named(tmp_path: Path) -> None:
    code, output = run(tmp_path, "whole-0", "once-1")
    assert code == 0
    (line,) = [line for line in output.splitlines() if "mend it" in line]
    assert line.endswith("test_some.py::test_run[once-1]")
    assert (runs_of(tmp_path, "once-1"), runs_of(tmp_path, "whole-0")) == (1 + TIMES, 1)


@pytest.mark.parametrize("again", range(2, 2 + TIMES))
def test_a_test_that_fails_at_any_of_its_runs_has_failed(tmp_path: Path, again: int) -> None:
    code, output = run(tmp_path, f"twice-1{again}", "once-1")
    assert code == 1
    assert "mend it" not in output
    assert runs_of(tmp_path, f"twice-1{again}") == again


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    names = [f"n{number}-1" for number in range(MOST + 1)]
    code, output = run(tmp_path, *names)
    assert (code, "at most" in output) == (1, True)
    assert [runs_of(tmp_path, name) for name in names] == [1] * len(names)
    assert len(failed_tests(tmp_path / "cache")) == len(names)


def test_a_run_that_named_no_failure_has_failed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.confirm_failures", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "not known" in done.stderr) == (1, True)
