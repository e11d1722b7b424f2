"""What is configured, what models there are, how the stages are: commands that only read."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from pipeline import paths, registry
from pipeline import status as records
from pipeline.config import find_file, load, render
from pipeline.config_schema import Config
from pipeline.process import EXIT_FATAL


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def config(as_json: bool) -> None:
    """Print the configuration in force; secrets are masked."""
    resolved = load()
    if as_json:
        click.echo(render(resolved, "json"), nl=False)
        return
    click.echo(f"# file: {find_file() or 'none, the defaults'}")
    for name, path in directories(resolved).items():
        click.echo(f"# {name}: {path}")
    click.echo(render(resolved), nl=False)


def directories(config: Config) -> dict[str, str]:
    """The directories in force, by name."""
    return {
        "home": str(paths.home()),
        "models": str(paths.models_dir()),
        "run": str(paths.run_dir(config)),
        "state": str(paths.state_dir(config)),
        "arenas": str(paths.arena_dir(config)),
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def models(as_json: bool) -> None:
    """List the configured models: file, digest, and whether they are ready to be served."""
    resolved = load()
    folder = paths.models_dir()
    rows: list[dict[str, Any]] = []
    for model in resolved.models:
        found = registry.find(model, folder)
        rows.append(
            {
                "name": model.name,
                "path": str(registry.gguf_path(model, folder)),
                "present": registry.gguf_path(model, folder).is_file(),
                "digest": found.digest if found else "",
                "bytes": found.nbytes if found else 0,
                "ingested": registry.find_index(model, folder) is not None,
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


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def status(as_json: bool) -> int:
    """Show every stage; exits 1 unless all of them are alive and ready."""
    found = records.read_all(paths.run_dir(load()))
    is_well = bool(found) and all(record.alive and record.ready for record in found)
    if as_json:
        _print_json(found)
    elif not found:
        click.echo("no stage is running")
    else:
        click.echo(f"{'stage':<12}{'pid':>8}{'uptime':>10}{'restarts':>10}  state")
        for record in found:
            uptime = record.uptime_s + max(0.0, time.time() - record.written) if record.alive else 0.0
            state = "gone" if not record.alive else "ready" if record.ready else record.reason or "not ready"
            click.echo(
                f"{record.stage:<12}{record.pid:>8}{uptime:>9.0f}s{record.restarts:>10}  {state}"
                + (", working" if record.alive and record.busy else "")
            )
    return 0 if is_well else EXIT_FATAL
