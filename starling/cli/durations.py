"""A span of time as an option: a bounded number of seconds."""

from __future__ import annotations

import math
from typing import Any

import click

MOST_S = 86_400.0


class Seconds(click.FloatRange):
    """From `least` to a day. Click's own range lets "nan" pass, which no deadline ever reaches."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__(min=least, max=MOST_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds
