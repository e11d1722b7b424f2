"""Values of a Prometheus text, each summed over its labels. Pure; lines that are not understood are skipped."""

from __future__ import annotations

import math
import re

_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def values(text: str) -> dict[str, float]:
    """Sum of each series' values, by name."""
    found: dict[str, float] = {}
    for line in text.split("\n"):
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


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    """The values of the series `name` by the value of one of their labels, each summed over the others."""
    found: dict[str, float] = {}
    for line in text.split("\n"):
        head, _, value = line.rpartition(" ")
        if not head.startswith(name + "{"):
            continue
        of = dict(_PAIR.findall(head)).get(label)
        for known, number in values(f"{name} {value}").items():
            if of is not None and known == name:
                found[of] = found.get(of, 0.0) + number
    return found
