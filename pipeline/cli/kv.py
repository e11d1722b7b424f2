"""`starling kv`: arenas, prefix tree, pages on disk and sessions, read without asking anybody."""

from __future__ import annotations

import importlib

import click
import msgspec
from rich.console import Console

from pipeline.cli.warm import warm
from pipeline.config import load
from pipeline.process import EXIT_FATAL, EXIT_OK


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def kv(context: click.Context, as_json: bool) -> int:
    """Show the KV cache: arenas, prefixes, files, sessions."""
    context.obj = as_json
    return EXIT_OK if context.invoked_subcommand else _report(as_json, check=False)


@kv.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def check(context: click.Context, as_json: bool) -> int:
    """Compute every checksum as well; exit code 1 when something is damaged."""
    return _report(as_json or bool(context.obj), check=True)


kv.add_command(warm)


def _report(as_json: bool, check: bool) -> int:
    # By name at run time, as stages are: this package does not import them.
    view = importlib.import_module("stages.kv.view")
    report = view.inspect(load(), check)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        Console(highlight=False).print(view.show(report))
    return EXIT_FATAL if report.problems else EXIT_OK
