"""The rules of configs/prometheus with shorter durations.

Every duration (`for`, and the ranges in expressions) is divided by one factor. Thresholds stay the same: events that an
`increase` counts have to come faster by that factor.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parents[2] / "configs" / "prometheus" / "rules.yml"
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_RANGE = re.compile(r"\[(\d+)(ms|s|m|h)\]")
_DURATION = re.compile(r"(\d+)(ms|s|m|h)")


def shortened(factor: float, path: Path = RULES) -> dict[str, Any]:
    """The contents of the rules file with durations divided by `factor`. Raises `ValueError` for unknown notation."""
    rules: dict[str, Any] = yaml.safe_load(path.read_text())

    def divide(match: re.Match[str]) -> str:
        return f"{max(1, round(int(match[1]) * _UNITS_MS[match[2]] / factor))}ms"

    for group in rules["groups"]:
        for rule in group["rules"]:
            ranges = rule["expr"].count("[")
            rule["expr"], found = _RANGE.subn(lambda match: f"[{divide(match)}]", rule["expr"])
            if found != ranges:
                raise ValueError(f"{path}: a range of {rule['expr']!r} is not a number with ms, s, m or h")
            if "for" in rule:
                match = _DURATION.fullmatch(rule["for"])
                if match is None:
                    raise ValueError(f"{path}: for: {rule['for']!r} is not a number with ms, s, m or h")
                rule["for"] = divide(match)
    return rules


def alert_names(rules: dict[str, Any]) -> list[str]:
    """The alerts of a rules file, in order."""
    return [rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
