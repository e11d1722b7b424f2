"""The result of a check."""

from __future__ import annotations

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
