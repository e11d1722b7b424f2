"""Files for results: what cannot be written is an error of usage before the work, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import click
import pytest

from pipeline.errors import StarlingError
from starling.cli.result_file import claimed, writing


def test_a_directory_that_may_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user may not even ask whether the file exists; root may, so the system's answer is given here."""

    def refuse(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with (
        pytest.raises(click.UsageError, match="--json .*Permission denied; name one that can be written"),
        claimed("--json", tmp_path / "out.json"),
    ):
        pytest.fail("the work began")


def test_an_empty_file_goes_and_contents_stay(tmp_path: Path) -> None:
    new, old, done = tmp_path / "new", tmp_path / "old", tmp_path / "done"
    old.write_bytes(b"old")
    with claimed("--json", new, old, done):
        assert new.exists()
        done.write_bytes(b"result")
    assert not new.exists()
    assert (old.read_bytes(), done.read_bytes()) == (b"old", b"result")


def test_a_failure_to_write_names_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(StarlingError, match="plots: No space left on device; the result was not written"),
        writing(tmp_path / "plots"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
