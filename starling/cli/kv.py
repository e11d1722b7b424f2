"""`starling kv`: arenas, prefix tree, page files and sessions. `kv check` also audits a running stage."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console

from pipeline.config.load import load
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling.cli.kv_warm import warm


@click.group(
    invoke_without_command=True,
    epilog="Exit codes: 0 done; 1 damage was found, without the checks of `starling kv check`.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def kv(context: click.Context, as_json: bool) -> int:
    """Show the KV cache: arenas, prefixes, files, sessions."""
    context.obj = as_json
    return EXIT_OK if context.invoked_subcommand else _report(as_json, check=False)


@kv.command(
    epilog="Exit codes: 0 no problem; 1 damage, counts that do not add up, or a running kv stage does not answer."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def check(context: click.Context, as_json: bool) -> int:
    """Check that every page is intact and that free + cached + leased == total.

    Verifies every checksum, in memory and on disk. With a running kv stage, its page table and the page headers must
    both add up and must agree. Without a server, only the files are checked.
    """
    return _report(as_json or bool(context.obj), check=True)


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
