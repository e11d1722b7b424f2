"""Certificates of a fleet, made for a test."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import FleetTlsConfig
from pipeline.fleet.peer_tls import PeerTls, Role, open_tls

pytest.importorskip("cryptography", reason="cryptography is not installed: make setup-dev")

from starling.fleet_certificates import describe, issue, make_authority


class Authority:
    """An authority, and what it issues: below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_authority(folder, 2)

    def issue(self, role: Role, name: str, into: str = "", *, age_days: int = 0) -> Path:
        """A certificate in a directory of its own. It lasts a day, and begins `age_days` ago."""
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age_days)
        return issue(self.folder, self.folder / (into or f"{role}-{name}"), role, name, 1, now=now)

    def serial(self, role: Role, name: str) -> str:
        return describe(self.folder / f"{role}-{name}" / f"{name}.pem").serial

    def section(self, role: Role, name: str, **more: Any) -> dict[str, Any]:
        """`fleet.tls` of a process with the certificate, which is issued unless it exists."""
        pem = self.folder / f"{role}-{name}" / f"{name}.pem"
        if not pem.exists():
            self.issue(role, name)
        files = {"cert": pem, "key": pem.with_suffix(".key"), "ca": self.folder / "authority.pem"}
        return {**{key: str(path) for key, path in files.items()}, **more}

    def open(self, role: Role, name: str, **more: Any) -> PeerTls:
        found = open_tls(FleetTlsConfig(**self.section(role, name, **more)), role, name if role == "agent" else "")
        assert found is not None
        return found

    def replace(self, role: Role, name: str) -> str:
        """Issue the certificate again and put it in the place of the old one, key first; the new serial number."""
        new = self.issue(role, name, into="new")
        place = self.folder / f"{role}-{name}"
        for path in (new.with_suffix(".key"), new):
            path.rename(place / path.name)
        shutil.rmtree(new.parent)
        return self.serial(role, name)
