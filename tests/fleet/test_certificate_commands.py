"""`starling fleet certificate`: files, their modes, and what is refused."""

from __future__ import annotations

import datetime
import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.config.schema import FleetTlsConfig
from pipeline.errors import InvalidRequest, StarlingError
from pipeline.fleet.peer_tls import open_tls
from starling.cli import cli

pytest.importorskip("cryptography", reason="cryptography is not installed: make setup-dev")

from starling.fleet_certificates import MAX_DAYS, issue


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, ["fleet", "certificate", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object) -> str:
    """The error; `starling` shows it and maps it to an exit code."""
    result = CliRunner().invoke(cli, ["fleet", "certificate", *map(str, arguments)])
    assert result.exit_code != 0
    return result.exception.message if isinstance(result.exception, StarlingError) else result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run("authority", "--out", tmp_path / "authority", "--days", 400)
    return tmp_path


def test_the_files_are_those_that_fleet_tls_names(folder: Path) -> None:
    authority = folder / "authority"
    pem = Path(run("agent", "gpu-1", "--authority", authority, "--out", folder / "hosts").output.strip())
    assert sorted(path.name for path in pem.parent.iterdir()) == ["gpu-1.key", "gpu-1.pem"]
    for key in (pem.with_suffix(".key"), authority / "authority.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    tls = FleetTlsConfig(cert=str(pem), key=str(pem.with_suffix(".key")), ca=str(authority / "authority.pem"))
    found = open_tls(tls, "agent", "gpu-1")
    assert found is not None and found.name == "gpu-1"
    shown = json.loads(run("show", pem, "--json").output)
    assert shown["holder"] == "agent:gpu-1"
    left = datetime.datetime.fromisoformat(shown["not_after"]) - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=364) < left <= datetime.timedelta(days=365)
    line = run("show", pem).output
    assert f"agent:gpu-1, serial number {shown['serial']}, until" in line
    assert json.loads(run("show", authority / "authority.pem", "--json").output)["holder"] == "authority"


def test_nothing_is_replaced(folder: Path) -> None:
    authority = folder / "authority"
    before = (authority / "authority.key").read_bytes()
    assert "exists already" in refused("authority", "--out", authority)
    assert (authority / "authority.key").read_bytes() == before
    arguments = ("orchestrator", "front-1", "--authority", authority, "--out", folder)
    run(*arguments)
    assert "exists already" in refused(*arguments)


@pytest.mark.parametrize(("arguments", "words"), [
    (("agent", "../x"), "the name '../x' cannot be used"),
    (("agent", "authority"), "that of the authority"),
    (("agent", "a", "--days", 401), "would outlast its authority"),
    (("agent", "a", "--days", MAX_DAYS + 1), "not in the range"),
    (("monitor", "m", "--authority", "/nowhere"), "make an authority with"),
    (("show", "/nowhere"), "cannot be read"),
])  # fmt: skip
def test_an_error_names_value_and_remedy(folder: Path, arguments: tuple[object, ...], words: str) -> None:
    more = () if "--authority" in arguments or arguments[0] == "show" else ("--authority", folder / "authority")
    assert words in refused(*arguments, *more)


def test_no_certificate_lasts_beyond_the_bound(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"expected 1 to {MAX_DAYS}"):
        issue(folder / "authority", folder, "agent", "a", MAX_DAYS + 1)
