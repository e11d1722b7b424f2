"""The result of a check."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """What one check found. A problem keeps the server from starting or serving; a warning costs speed or space."""

    check: str
    state: State
    found: str
    remedy: str = ""  # what to change; "" if nothing


def ok(check: str, found: str) -> Finding:
    """Nothing to change."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """It works, and would be better otherwise."""
    return Finding(check, "warning", found, remedy)


def problem(check: str, found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check, "problem", found, remedy)


def megabytes(count: int) -> str:
    """Bytes as MB or GB with thousands separators."""
    return f"{count / 1e9:,.1f} GB" if count >= 10_000_000_000 else f"{count / 1e6:,.0f} MB"


def disk_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk. What is removed or renamed meanwhile may be left out."""
    total = 0
    for directory, _, names in os.walk(folder):  # passes over directories that are gone
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total
