"""Files for results: what cannot be written is an error of usage before the work, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pipeline.errors import StarlingError
from starling.cli.result_file import claimed, write, writing


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


def test_a_result_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    """A real limit: no file of this process may grow."""
    path, link = tmp_path / "out.json", tmp_path / "latest.json"
    link.symlink_to(path)
    write(link, b"earlier")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, limits[1]))
    try:
        with pytest.raises(StarlingError, match="File too large; the result was not written"):
            write(link, b"another")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"earlier"
    assert link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest.json", "out.json"]
    write(Path("/dev/null"), b"another")


PRINTS_TWICE = """
import sys
from pathlib import Path
from starling.cli.result_file import claimed, write
print("before")
with claimed("--json", path := Path(sys.argv[1])):
    write(path, b"x" * 200_000)
print("after")
"""


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_output_gets_the_result_between_the_lines(tmp_path: Path, path: str, kind: str) -> None:
    command = [sys.executable, "-c", PRINTS_TWICE, path]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    if kind == "pipe":
        out = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=120).stdout
    else:
        with (tmp_path / "out").open("wb") as file:
            subprocess.run(command, env=env, stdout=file, check=True, timeout=120)
        out = (tmp_path / "out").read_bytes()
        assert [one.name for one in tmp_path.iterdir()] == ["out"]
    assert out == b"before\n" + b"x" * 200_000 + b"after\n"


def test_another_pipe_gets_the_result(tmp_path: Path) -> None:
    read, written = os.pipe()
    try:
        write(Path(f"/dev/fd/{written}"), b"result")
        assert os.read(read, 100) == b"result"
    finally:
        os.close(read)
        os.close(written)


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS])
def test_a_file_whose_directory_cannot_be_written_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """Root may write any directory, and a mount needs rights: so the system's answer is given here."""

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(reason, os.strerror(reason), str(path))

    monkeypatch.setattr("starling.cli.result_file.replace_file", refuse)
    path = tmp_path / "out.json"
    path.write_bytes(b"an earlier and longer one")
    write(path, b"result")
    assert path.read_bytes() == b"result"


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"an earlier one")
    path.chmod(0o600)
    write(path, b"result")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"result", 0o600)
