"""`starling kv`: arenas, prefix tree, pages on disk and sessions, read without a server; `kv check` asks it as well."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console

from pipeline.config.load import load
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling.cli.kv_warm import warm


@click.group(
    invoke_without_command=True,
    epilog="Exit codes: 0 done; 1 something is damaged, as far as is seen without `starling kv check`.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def kv(context: click.Context, as_json: bool) -> int:
    """Show the KV cache: arenas, prefixes, files, sessions."""
    context.obj = as_json
    return EXIT_OK if context.invoked_subcommand else _report(as_json, check=False)


@kv.command(
    epilog="Exit codes: 0 all is well; 1 something is damaged or does not add up, or a live kv stage does not answer."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def check(context: click.Context, as_json: bool) -> int:
    """Is every page sound, and does free + cached + leased == total hold?

    Computes every checksum, in memory and on disk. A running kv stage is asked for its own books as well: by them and
    by the page headers the sum must hold, and both must tell the same. Without a server the files are checked alone.
    """
    return _report(as_json or bool(context.obj), check=True)


kv.add_command(warm)


def _report(as_json: bool, check: bool) -> int:
    from stages.kv import view

    report = view.inspect(load(), check)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        Console(highlight=False).print(view.show(report))
    return EXIT_FATAL if report.problems else EXIT_OK
