"""`starling config` and `starling models`: print the configuration and the configured models."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import find_file, load, render
from pipeline.config.schema import Config, ModelConfig
from pipeline.models import store
from starling.cli.options import exit_codes, json_option
from starling.cli.prepare import chosen_models

CODES = exit_codes({0: "success", 78: "the configuration is wrong"})


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


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


@click.command(epilog=CODES)
@json_option()
@click.option("--plan", "with_plan", is_flag=True, help="Show the memory and the speed of prepared models instead.")
@click.argument("name", required=False)
def models(as_json: bool, with_plan: bool, name: str | None) -> None:
    """List the configured models with their files and states.

    NAME is a configured model; the default is all of them.

    \b
    to be fetched   the file is missing
    fetched         the file is there and not ingested yet
    ready           the checkpoint is there
    """
    resolved = load()
    folder = paths.models_dir()
    rows: list[dict[str, Any]] = []
    chosen = chosen_models(resolved, name)
    if with_plan:
        _show_plans(resolved, chosen, as_json)
        return
    for model in chosen:
        found = store.find(model, folder)
        rows.append(
            {
                "name": model.name,
                "path": str(store.gguf_path(model, folder)),
                "present": store.gguf_path(model, folder).is_file(),
                "digest": found.digest if found else "",
                "bytes": found.nbytes if found else 0,
                "ingested": store.find_index(model, folder) is not None,
            }
        )
    if as_json:
        _print_json(rows)
        return
    for row in rows:
        state = "ready" if row["ingested"] else "fetched" if row["present"] else "to be fetched"
        size = f", {row['bytes'] / 1e6:.0f} MB" if row["bytes"] else ""
        click.echo(f"{row['name']}  {state}{size}")
        click.echo(f"  {row['path']}")
        if row["digest"]:
            click.echo(f"  sha256 {row['digest']}")


def _show_plans(config: Config, chosen: tuple[ModelConfig, ...], as_json: bool) -> None:
    from starling.cli import plan  # imports numpy, which no other listing needs

    plans = {model.name: plan.plan(config, model, paths.models_dir()) for model in chosen}
    if as_json:
        _print_json([found for found in plans.values() if found is not None])
        return
    for name, found in plans.items():
        for line in plan.lines(found) if found else [f"{name}  not prepared: run `starling prepare {name}` first"]:
            click.echo(line)
