"""Values of a Prometheus text, each summed over its labels. Pure; lines that are not understood are skipped."""

from __future__ import annotations

import math


def values(text: str) -> dict[str, float]:
    """Sum of each series' values, by name."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        head, _, value = line.rpartition(" ")
        name = head.partition("{")[0].strip()
        try:
            number = float(value)
        except ValueError:
            continue
        if name and math.isfinite(number):
            found[name] = found.get(name, 0.0) + number
    return found
