"""`starling kv`: print and check the KV cache. Reads the files; `kv check` also queries a running kv stage."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console

from pipeline.config.load import load
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling.cli.kv_clear import clear
from starling.cli.kv_warm import warm
from starling.cli.options import exit_codes, json_option


@click.group(
    invoke_without_command=True,
    epilog=exit_codes({0: "no damage found", 1: "damage found (only `starling kv check` verifies the pages)"}),
)
@json_option()
@click.pass_context
def kv(context: click.Context, as_json: bool) -> int:
    """Show the KV cache: arenas, prefixes, files and sessions.

    Works without a running server.
    """
    context.obj = as_json
    return EXIT_OK if context.invoked_subcommand else _report(as_json, check=False)


@kv.command(
    epilog=exit_codes(
        {0: "no damage found", 1: "damage or a wrong sum was found, or a running kv stage does not answer"}
    )
)
@json_option()
@click.pass_context
def check(context: click.Context, as_json: bool) -> int:
    """Verify every page's checksum and the page counts.

    Computes all checksums in memory and on disk, and checks that free + cached + leased pages are the total. A
    running kv stage sends its page table as well: the sum must hold there too, and both must agree. Without a server
    only the files are checked.
    """
    return _report(as_json or bool(context.obj), check=True)


kv.add_command(clear)
kv.add_command(warm)


def _report(as_json: bool, check: bool) -> int:
    # Imported here: NumPy and the stage's modules would slow down every other command.
    from stages.kv.inspection import inspect
    from starling.cli.kv_tables import render

    report = inspect(load(), check)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        Console(highlight=False).print(render(report))
    return EXIT_FATAL if report.problems else EXIT_OK
