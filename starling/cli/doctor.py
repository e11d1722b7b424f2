"""`starling doctor`: check the machine and this home, and say what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click
import msgspec

from pipeline.config import server_cores
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.process import EXIT_CONFIG
from starling.cli.options import exit_codes, json_option
from starling.cli.terminal import width
from starling.doctor.finding import Finding

NAME = 14  # columns of a check's name
MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "problem": ("FAIL", "red")}


@click.command(
    epilog=exit_codes(
        {
            0: "nothing keeps the server from starting; there may be warnings",
            78: "a check failed: the configuration or the machine must be changed first",
        }
    )
)
@json_option("Print JSON: check, state (ok, warning, problem), found, remedy.")
def doctor(as_json: bool) -> int:
    """Check the machine and this home, and say what to change.

    Reads the CPU's features, cores and limits of control groups, memory, shared memory, huge pages, open files, the
    clock, directories, the port, models and compiled kernels, and what crashes have left. Changes nothing.
    """
    found = list(examine())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for finding in found:
            for line in lines(finding):
                click.echo(line)
        click.echo(conclusion(found))
    return EXIT_CONFIG if any(finding.state == "problem" for finding in found) else 0


def examine() -> Iterator[Finding]:
    """Every finding. A configuration that is wrong ends the checks, because all others depend on it."""
    from starling.doctor.finding import problem
    from starling.doctor.home import check_home
    from starling.doctor.machine import Machine, check_machine

    try:
        config = load()
        check_cores(config)
    except ConfigError as error:
        yield problem("configuration", error.message, "correct it; `starling config` prints what is in force")
        return
    yield from check_machine(config, Machine())
    yield from check_home(config)


def check_cores(config: Config) -> None:
    """Raise `ConfigError` if the server that runs, or would start here, has too few cores."""
    server_cores.check(config, server_cores.of(config))


def lines(finding: Finding) -> Iterator[str]:
    """Lines of the terminal's columns, at most 80; long texts go on below."""
    columns = width()
    mark, colour = MARKS[finding.state]
    first = f"{click.style(f'{mark:<4}', fg=colour)}  {finding.check:<{NAME}} "
    indent = " " * (4 + 2 + NAME + 1)
    if len(finding.check) > NAME:
        yield first.rstrip()
        first = indent
    text = textwrap.wrap(finding.found, columns - len(indent), break_on_hyphens=False) or [""]
    yield first + text[0]
    for line in text[1:]:
        yield indent + line
    for line in textwrap.wrap("-> " + finding.remedy, columns - len(indent), break_on_hyphens=False):
        if finding.remedy:
            yield indent + line


def conclusion(found: list[Finding]) -> str:
    """The last line."""
    counts = {state: sum(finding.state == state for finding in found) for state in MARKS}
    if counts["problem"]:
        return f"{counts['problem']} problem(s), {counts['warning']} warning(s): the server cannot start or serve yet"
    return f"no problem, {counts['warning']} warning(s): the server can start"
