"""The dependency audit: what it finds, and that it passes where no database can be reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tools.audit import ROOT, NoDatabase, Vulnerability, is_affected, main, pins, read_report, search

RANGE = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}, {"introduced": "2.5"}]}


def export(path: Path, *entries: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for entry in entries:
            archive.writestr(f"{entry['id']}.json", json.dumps(entry))
    return path


def entry(package: str, **affected: Any) -> dict[str, Any]:
    return {
        "id": f"PYSEC-{package.lower()}",
        "affected": [{"package": {"ecosystem": "PyPI", "name": package}, **affected}],
    }


def test_pins_of_the_lock_files() -> None:
    runtime, development = (pins(ROOT / "locks" / name) for name in ("requirements.lock", "requirements-dev.lock"))
    assert {"numpy", "pyzmq", "msgspec"} <= runtime.keys() <= development.keys()
    assert "pip-audit" in development


@pytest.mark.parametrize(
    ("version", "expected"), [("1.0", True), ("1.9.9", True), ("2.0", False), ("2.4", False), ("2.5.1", True)]
)
def test_versions_within_a_range(version: str, expected: bool) -> None:
    assert is_affected({"ranges": [RANGE]}, version) is expected


def test_other_kinds_of_ranges_do_not_count() -> None:
    assert not is_affected({"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}, "1.0")
    assert is_affected({"versions": ["1.0"], "ranges": []}, "1.0")


def test_a_copy_of_the_database(tmp_path: Path) -> None:
    database = export(tmp_path / "all.zip", entry("NumPy", ranges=[RANGE]), entry("other", versions=["1"]))
    assert search(database, {"numpy": "1.5"}) == [Vulnerability("numpy", "1.5", "PYSEC-numpy", "2.0")]
    assert search(database, {"numpy": "2.1"}) == []
    withdrawn = export(tmp_path / "none.zip", {**entry("numpy", ranges=[RANGE]), "withdrawn": "2026-01-01T00:00:00Z"})
    assert search(withdrawn, {"numpy": "1.5"}) == []


def test_the_command_fails_for_a_locked_version(tmp_path: Path) -> None:
    version = pins(ROOT / "locks" / "requirements.lock")["msgspec"]
    database = export(tmp_path / "all.zip", entry("msgspec", versions=[version]))
    result = CliRunner().invoke(main, ["--database", str(database)])
    assert result.exit_code == 1
    assert f"msgspec {version}: PYSEC-msgspec" in result.output
    clean = export(tmp_path / "clean.zip", entry("msgspec", versions=["0.0.1"]))
    result = CliRunner().invoke(main, ["--database", str(clean)])
    assert result.exit_code == 0
    assert "requirements-dev.lock: 0 known vulnerabilities" in result.output


def test_a_report_of_pip_audit() -> None:
    vulnerable = {"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["1.1"]}]}
    report = {"dependencies": [vulnerable, {"name": "b", "skip_reason": "not found"}]}
    assert read_report(report, "pypi") == [Vulnerability("a", "1", "X-1", "1.1")]
    with pytest.raises(NoDatabase, match="pypi knows none of the packages"):
        read_report({"dependencies": [{"name": "b", "skip_reason": "not found"}]}, "pypi")


@pytest.mark.slow
def test_the_audit_passes_without_a_network() -> None:
    """Through the real client, with a proxy that refuses connections."""
    environment = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    run = subprocess.run(
        [sys.executable, "-m", "tools.audit"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("dependency audit: skipped, no database of vulnerabilities can be reached (pypi: ")
