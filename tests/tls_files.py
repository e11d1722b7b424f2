"""Certificates of tests/data/tls, for localhost, 127.0.0.1 and ::1: valid from 2020 to 2119, `expired` until 2021."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

DATA = Path(__file__).parent / "data" / "tls"


def place(directory: Path, name: str) -> tuple[Path, Path]:
    """Put certificate `name` and its key into the directory, or replace those that are there, by rename."""
    directory.mkdir(parents=True, exist_ok=True)
    placed = []
    for ending, mode in ((".pem", 0o644), (".key", 0o600)):
        new = directory / f"new{ending}"
        shutil.copyfile(DATA / f"{name}{ending}", new)
        new.chmod(mode)
        placed.append(new.rename(directory / f"server{ending}"))
    return placed[0], placed[1]


def trusting() -> ssl.SSLContext:
    """A client's context that trusts the authority of the tests."""
    return ssl.create_default_context(cafile=str(DATA / "ca.pem"))


def der(name: str) -> bytes:
    """The certificate `name`, as `getpeercert(True)` returns it."""
    return ssl.PEM_cert_to_DER_cert((DATA / f"{name}.pem").read_text())
