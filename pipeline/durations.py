"""Times as clients and operators write them: seconds, or a text like "5m", "1h30m" and "500ms"."""

from __future__ import annotations

import math
import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(ms|s|m|h|d)")
_NUMBER = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,6})?")
MAX_SECONDS = 31_536_000.0  # a year
FORM = 'seconds or a time like "5m" or "1h30m", of at most a year; 0: at once, -1: never'


def seconds_of(value: int | float | str) -> float:
    """Return the seconds of a time; infinity for a negative one. Raises `ValueError`."""
    seconds = _of_text(value.strip()) if isinstance(value, str) else float(value)
    if seconds < 0:
        return math.inf
    if not seconds <= MAX_SECONDS:
        raise ValueError(f"{value!r} is not {FORM}")
    return seconds


def _of_text(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    is_negative, rest = text.startswith("-"), text.removeprefix("-")
    parts = _PART.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        raise ValueError(f"{text[:40]!r} is not {FORM}")
    total = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return -total if is_negative else total
