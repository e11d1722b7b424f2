"""`starling fleet down|launched|logs`: the agents that a launcher runs."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from pipeline.config.load import load
from pipeline.observe.log_format import LIBRARY_EVENT, pretty
from shm.decoding import DECODE_ERRORS
from starling.cli import completion
from starling.cli.options import exit_codes, json_option
from starling.cli.tables import print_table
from starling.launchers.select import NAMES, open_launcher

CODES = exit_codes(
    {
        0: "success",
        1: "failure, such as a cluster that does not answer, or an agent without a log",
        2: "wrong usage",
        78: "the configuration or the machine must be changed first",
    }
)


def launcher_option(command: Any) -> Any:
    """The decorator of the option `--launcher`, the parameter `launcher`."""
    return click.option(
        "--launcher",
        type=click.Choice(NAMES),
        metavar="|".join(NAMES),
        help="What runs the agents; default: fleet.launcher.",
    )(command)


@click.command(epilog=CODES)
@launcher_option
def down(launcher: str | None) -> int:
    """End the fleet that `starling fleet up` has started.

    Streams in flight finish first.
    """
    open_launcher(load(), launcher).stop()
    click.echo("ended")
    return 0


@click.command(epilog=CODES)
@json_option()
@launcher_option
def launched(as_json: bool, launcher: str | None) -> int:
    """List the agents that the launcher runs, and where.

    `starling fleet agents` lists those that serve.
    """
    found = open_launcher(load(), launcher).list()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    rows = [[one.agent_id, one.state, one.host, str(one.restarts)] for one in found]
    print_table(("agent", "state", "host", "restarts"), rows, right=("restarts",))
    return 0


@click.command(epilog=CODES)
@click.argument("agent", shell_complete=completion.launched_agents)
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they come, until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, 1_000_000),
    default=50,
    show_default=True,
    help="How many last lines.",
)
@json_option("Print each line as JSON.")
@launcher_option
def logs(agent: str, follow: bool, lines: int, as_json: bool, launcher: str | None) -> int:
    """Print the log of AGENT, which its launcher runs."""
    for line in open_launcher(load(), launcher).logs(agent, lines, follow=follow):
        click.echo(_shown(line, as_json))
    return 0


def _shown(line: str, as_json: bool) -> str:
    """A line of a log, which a cluster may mix with the text of other programs."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except DECODE_ERRORS:
        text = {"event": LIBRARY_EVENT, "text": line}
        return msgspec.json.encode(text).decode() if as_json else line
    return line if as_json else pretty(fields)
