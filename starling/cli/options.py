"""What several commands share: the option types for seconds, `--json`, and the exit codes at the end of a help page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import click

DAY_S = 86_400.0
HELP_COLUMNS = 76  # a help page has 80, of which click indents the epilog by 2


class Number(click.FloatRange):
    """A number in a range. Click's FloatRange accepts "nan", which is in no range."""

    what = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; NaN is refused."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a {self.what} in the range {self._describe_range()}", param, ctx)
        return number


class Seconds(Number):
    """A number of seconds from `least_s` to a day."""

    what = "number of seconds"

    def __init__(self, least_s: float = 0.0) -> None:
        super().__init__(min=least_s, max=DAY_S)


def timeout_option(default_s: float, help: str, least_s: float = 0.0, name: str = "--timeout") -> Callable[[Any], Any]:
    """The decorator of an option in seconds."""
    return click.option(name, type=Seconds(least_s), default=default_s, show_default=True, metavar="SECONDS", help=help)


def json_option(help: str = "Print JSON.") -> Callable[[Any], Any]:
    """The decorator of the option `--json`, the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def cacert_option(command: Callable[..., Any], **attributes: Any) -> Callable[..., Any]:
    """The decorator of the option `--cacert`. `attributes`: further ones of the option."""
    return click.option(
        "--cacert",
        envvar="STARLING_CACERT",
        default="",
        type=click.Path(),  # for completion; the file is read later
        metavar="FILE",
        help="PEM file with the authority of an https:// server; default: $STARLING_CACERT, else the system's.",
        **attributes,
    )(command)


def exit_codes(meanings: Mapping[int, str]) -> str:
    """The end of a help page: a line or more for each exit code, in a paragraph that click does not wrap again."""
    lines = ["Exit codes:"]
    for code, meaning in sorted({**meanings, 130: "interrupted"}.items()):
        lines += textwrap.wrap(meaning, HELP_COLUMNS, initial_indent=f"  {code:<4} ", subsequent_indent=" " * 7)
    return "\b\n" + "\n".join(lines)
