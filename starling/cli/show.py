"""`starling config`: print the configuration."""

from __future__ import annotations

import click

from pipeline.config import paths
from pipeline.config.load import find_file, load, render
from pipeline.config.schema import Config
from starling.cli.options import exit_codes, json_option

CODES = exit_codes({0: "success", 78: "the configuration is wrong"})


@click.command(epilog=CODES)
@json_option()
def config(as_json: bool) -> None:
    """Print the configuration in force, with secrets masked.

    The first lines name the configuration file and the directories.
    """
    resolved = load()
    if as_json:
        click.echo(render(resolved, "json"), nl=False)
        return
    click.echo(f"# file: {find_file() or 'none (defaults)'}")
    for name, path in directories(resolved).items():
        click.echo(f"# {name}: {path}")
    click.echo(render(resolved), nl=False)


def directories(config: Config) -> dict[str, str]:
    """Paths of the directories in use, by name."""
    return {
        "home": str(paths.home()),
        "models": str(paths.models_dir()),
        "run": str(paths.run_dir(config)),
        "state": str(paths.state_dir(config)),
        "arenas": str(paths.arena_dir(config)),
    }
