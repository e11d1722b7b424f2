"""A run imports the files that have a test for it, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.collection import is_needed

TESTS = Path(__file__).resolve().parents[1]
SOME = "@pytest.mark.slow\ndef test_a():\n    pass\n\n\ndef test_b():\n    pass\n"


@pytest.mark.parametrize(
    ("text", "is_slow", "is_fast"),
    [
        ("def test_a():\n    pass\n", False, True),
        (SOME, True, True),
        ("pytestmark = pytest.mark.slow\n\n\ndef test_a():\n    pass\n", True, False),
        ("pytestmark = [\n    pytest.mark.slow,\n    pytest.mark.timeout(3),\n]\n", True, False),
        ("pytestmark = pytest.mark.slow if IS_REAL else []\n", True, True),
        ("    pytestmark = pytest.mark.slow\n", True, True),  # of a class
    ],
)
def test_the_text_of_a_file_decides(tmp_path: Path, text: str, is_slow: bool, is_fast: bool) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(text)
    assert (is_needed(path, "slow"), is_needed(path, "not slow")) == (is_slow, is_fast)
    assert is_needed(path, "") and is_needed(path, "hypothesis and not slow")
    helper = path.rename(tmp_path / "helper.py")
    assert is_needed(helper, "slow") and is_needed(helper, "not slow")


def test_marks_stand_in_the_files_of_the_tests() -> None:
    """Otherwise a file could have slow tests that its text does not show."""
    others = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_")]
    assert [path.name for path in others if "mark.slow" in path.read_text()] == []


def test_a_run_leaves_files_out_that_it_does_not_name() -> None:
    def collected(*named: str) -> str:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--collect-only",
            "-p",
            "no:cacheprovider",
            "-m",
            "slow",
            *named,
        ]
        return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False).stdout

    assert "deselected" not in collected("tests/protocol")
    assert "deselected" in collected("tests/protocol/test_model.py")
