"""Known vulnerabilities of the locked dependencies: `python -m tools.audit`, part of `make check`.

Asks the databases that `pip-audit` knows (the package index, then osv.dev).  Where none can be reached, one line says
so and the check passes: it must not fail for want of a network.  `--database FILE` reads a copy instead, the export of
osv.dev for PyPI (`all.zip`), and needs no network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "requirements-dev.lock")
SERVICES = ("pypi", "osv")
TIMEOUT_S = 120  # for one lock file and service
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


class NoDatabase(Exception):
    """No database could be reached; the message is the reason."""


class Vulnerability(NamedTuple):
    """A locked version that a database names."""

    package: str
    version: str
    id: str
    fixed: str  # versions without it, "" when there is none

    def __str__(self) -> str:
        remedy = f"fixed in {self.fixed}: run make lock ARGS=--upgrade" if self.fixed else "no version without it"
        return f"{self.package} {self.version}: {self.id}; {remedy}"


def normalized(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: Path) -> dict[str, str]:
    """Version by package of a lock file."""
    return {normalized(name): version for name, version in _PIN.findall(lock.read_text())}


# ------------------------------------------------------------------ pip-audit


def ask(lock: Path, service: str) -> list[Vulnerability]:
    """What `pip-audit` finds. Raises `NoDatabase`."""
    options = ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", "-r", str(lock), "--vulnerability-service", service, *options]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoDatabase(f"{service} has not answered within {TIMEOUT_S} s") from None
    try:
        return read_report(json.loads(run.stdout), service)
    except ValueError:
        lines = run.stderr.strip().splitlines() or [f"pip-audit ended with {run.returncode}"]
        raise NoDatabase(f"{service}: {lines[-1][:120]}") from None


def read_report(report: dict[str, Any], service: str) -> list[Vulnerability]:
    """The vulnerabilities of a report. Raises `NoDatabase` if the service knows none of the packages."""
    found = report["dependencies"]
    if all("skip_reason" in package for package in found):
        raise NoDatabase(f"{service} knows none of the packages")
    return [
        Vulnerability(package["name"], package["version"], entry["id"], ", ".join(entry.get("fix_versions", [])))
        for package in found
        for entry in package.get("vulns", [])
    ]


# ------------------------------------------------------------------ a copy of osv.dev


def search(database: Path, locked: dict[str, str]) -> list[Vulnerability]:
    """The entries of an export that name a locked version."""
    found = []
    with zipfile.ZipFile(database) as archive:
        for name in archive.namelist():
            entry = json.loads(archive.read(name))
            if "withdrawn" in entry:
                continue
            for affected in entry.get("affected", []):
                package = normalized(affected.get("package", {}).get("name", ""))
                if package in locked and is_affected(affected, locked[package]):
                    fixed = sorted({str(event["fixed"]) for event in _events(affected) if "fixed" in event})
                    found.append(Vulnerability(package, locked[package], entry["id"], ", ".join(fixed)))
    return sorted(set(found))


def is_affected(affected: dict[str, Any], version: str) -> bool:
    """Whether a version is listed, or lies in a range (https://ossf.github.io/osv-schema/)."""
    if version in affected.get("versions", []):
        return True
    return any(_is_within(one["events"], version) for one in affected.get("ranges", []) if one["type"] == "ECOSYSTEM")


def _events(affected: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for one in affected.get("ranges", []):
        if one["type"] == "ECOSYSTEM":
            yield from one["events"]


def _is_within(events: list[dict[str, Any]], version: str) -> bool:
    is_inside = False
    try:
        ours = Version(version)
        for event in sorted(events, key=lambda event: Version(next(iter(event.values())))):
            if "introduced" in event and ours >= Version(event["introduced"]):
                is_inside = True
            if ("fixed" in event and ours >= Version(event["fixed"])) or (
                "last_affected" in event and ours > Version(event["last_affected"])
            ):
                is_inside = False
    except InvalidVersion:
        return False
    return is_inside


# ------------------------------------------------------------------ the command


def audit(lock: Path, database: Path | None) -> list[Vulnerability]:
    """All known vulnerabilities of a lock file. Raises `NoDatabase` with the reason of each service."""
    if database is not None:
        return search(database, pins(lock))
    reasons = []
    for service in SERVICES:
        try:
            return ask(lock, service)
        except NoDatabase as error:
            reasons.append(str(error))
    raise NoDatabase("; ".join(reasons))


@click.command()
@click.option("--database", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="export of osv.dev")
def main(database: Path | None) -> None:
    """Print the known vulnerabilities of the locked dependencies; exits 1 if there are any."""
    has_any = False
    for name in LOCKS:
        lock = ROOT / "locks" / name
        try:
            found = audit(lock, database)
        except NoDatabase as error:
            click.echo(f"dependency audit: skipped, no database of vulnerabilities can be reached ({error})")
            break
        has_any = has_any or bool(found)
        click.echo(f"dependency audit of {name}: {len(found)} known vulnerabilities in {len(pins(lock))} packages")
        for vulnerability in found:
            click.echo(f"  {vulnerability}")
    sys.exit(has_any)


if __name__ == "__main__":
    main()
