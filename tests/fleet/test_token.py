"""The secret of a fleet: made once, for its user alone, and compared as a whole."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.errors import ConfigError, Unauthenticated
from pipeline.fleet import token
from starling.cli import cli


def test_it_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "fleet-token"
    made = token.load_or_create(path)
    assert len(made) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert token.load_or_create(path) == made
    assert [one.name for one in path.parent.iterdir()] == ["fleet-token"]


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from pipeline.fleet import token; print(token.load_or_create(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t")]
    begun = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {process.communicate()[0] for process in begun}
    assert found == {token.load_or_create(tmp_path / "t") + "\n"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "t"
    token.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="only this user can read: chmod 600"):
        token.load_or_create(path)


@pytest.mark.parametrize("contents", ["", "short", "a" * 31, "a b" * 20, "\x00" * 64, "é" * 40])
def test_a_file_without_a_token_is_refused(tmp_path: Path, contents: str) -> None:
    path = tmp_path / "t"
    path.touch(0o600)
    path.write_text(contents)
    with pytest.raises(ConfigError, match="has no token: expected one line of 32 to 256"):
        token.load_or_create(path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be read or made"):
        token.load_or_create(tmp_path / "file" / "t")


def test_the_token_for_metrics_is_another_one_that_opens_nothing_else() -> None:
    secret = "s" * 40
    derived = token.for_metrics(secret)
    assert derived == hashlib.sha256(b"starling-metrics:" + b"s" * 40).hexdigest(), "as the chart computes it"
    for each in (derived, secret):
        assert token.reads_metrics(f"Bearer {each}", secret)
    with pytest.raises(Unauthenticated):
        token.check(f"Bearer {derived}", secret)
    for header in (None, "", derived, f"Basic {derived}", f"Bearer {derived}x", f"Bearer {token.for_metrics(derived)}"):
        assert not token.reads_metrics(header, secret)
    # Where only TLS is accepted there is no token, and none for metrics either.
    assert token.for_metrics("") == ""
    for header in ("Bearer ", "Bearer", f"Bearer {hashlib.sha256(b'starling-metrics:').hexdigest()}"):
        assert not token.reads_metrics(header, "")


def test_the_token_for_metrics_is_printed_on_a_host_of_the_fleet(tmp_path: Path) -> None:
    def run() -> Result:
        return CliRunner().invoke(cli, ["fleet", "metrics-token"], env={"STARLING_HOME": str(tmp_path)})

    missing = run().exception
    assert isinstance(missing, ConfigError) and "run this on a host of the fleet" in missing.message
    assert not (tmp_path / "fleet-token").exists()
    made = token.load_or_create(tmp_path / "fleet-token")
    assert run().output == token.for_metrics(made) + "\n"


def test_the_header_must_carry_it() -> None:
    secret = "s" * 40
    token.check(token.authorization(secret)["Authorization"], secret)
    token.check(f"bearer {secret}", secret)
    for header in (None, "", secret, f"Basic {secret}", f"Bearer {secret}x", "Bearer " + secret[:-1], "Bearer \udcff"):
        with pytest.raises(Unauthenticated):
            token.check(header, secret)
