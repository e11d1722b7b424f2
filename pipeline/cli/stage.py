"""Start one stage: bare, or under a supervisor that keeps it alive."""

from __future__ import annotations

import importlib
import sys

import click

from pipeline import leftovers, paths
from pipeline.config import load
from pipeline.errors import ConfigError

STAGES = ("tokenizer", "scheduler", "kv", "worker", "gateway")

_STAGE = click.Choice(STAGES)


@click.command()
@click.argument("name", type=_STAGE, metavar="STAGE")
@click.option("--model", default="", metavar="NAME", help="The worker's model; default: the first.")
def stage(name: str, model: str) -> int:
    """Run STAGE in this process, without a supervisor."""
    config = load()
    if name != "worker":
        _refuse_model(name, model)
        return int(importlib.import_module(f"stages.{name}.stage").main(config) or 0)
    chosen = config.model(model)
    if chosen is None:
        known = ", ".join(known.name for known in config.models)
        raise ConfigError(f"--model {model}: no such model is configured; there are {known}")
    return int(importlib.import_module("stages.worker.stage").main(config, chosen.name) or 0)


@click.command()
@click.argument("name", type=_STAGE, metavar="STAGE")
@click.option("--model", default="", metavar="NAME", help="The worker's model; default: the first.")
def supervise(name: str, model: str) -> int:
    """Keep STAGE alive: restart it when it dies, give up loudly when it dies too often."""
    from pipeline.supervisor import supervise as keep_alive

    config = load()
    _refuse_model(name, model)
    command = [sys.executable, "-m", "pipeline.cli", "stage", name]
    code = keep_alive(name, command + (["--model", model] if model else []), config)
    leftovers.sweep(paths.run_dir(config), paths.arena_dir(config))
    return code


def _refuse_model(name: str, model: str) -> None:
    if model and name != "worker":
        raise click.UsageError(f"--model is the worker's; the stage {name} serves every model")
