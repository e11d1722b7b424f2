"""`starling models`, `show`, `rm` and `gc`: what is stored, and how it goes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ConfigError, ModelNotFound, StarlingError
from pipeline.models import collect, registry
from pipeline.models.locks import lock
from pipeline.runtime.process import EXIT_CONFIG
from shm.checkpoint import CheckpointError
from starling import model_list
from starling.cli import completion
from starling.cli.options import exit_codes, json_option
from starling.cli.prepare import chosen_models
from starling.cli.status import duration, size
from starling.cli.terminal import complain, print_wrapped

CODES = exit_codes({0: "success", 78: "the configuration is wrong"})
SHOWN = exit_codes({0: "success", 2: "no such model", 78: "the configuration is wrong"})
REMOVED = exit_codes(
    {0: "success", 2: "no such model", 78: "the model is loaded or was not pulled, or the configuration is wrong"}
)
PLAN_INDENT = 15  # of what continues a line of a plan
TITLES = ("NAME", "ARCH", "SIZE", "QUANT", "CTX", "DIGEST", "STATE", "USED")
LEAVE = ("DIGEST", "ARCH", "CTX")  # a narrow terminal, in this order


@click.command(
    epilog=exit_codes(
        {
            0: "success",
            2: "no such model",
            78: "the configuration is wrong; with --plan also: a model's files are damaged",
        }
    )
)
@click.argument("name", required=False, shell_complete=completion.model_names)
@click.option("--plan", "with_plan", is_flag=True, help="Show the memory and the speed of prepared models instead.")
@json_option()
def models(name: str | None, with_plan: bool, as_json: bool) -> int:
    """List the configured and the pulled models.

    NAME is one of them; the default is all.

    \b
    loaded          the running server has it
    loading         the running server loads it
    unloading       it goes when its requests have ended
    ready           converted; the next load needs no preparation
    fetched         the file is there and not converted yet
    changed         the file is not the one that was pulled
    to be fetched   the file is missing

    USED is the time since its last request, or since it was last loaded.
    """
    from starling.cli.tables import print_table

    config = load()
    chosen = chosen_models(config, name) if name else model_list.known(config)
    if with_plan:
        return _show_plans(config, chosen, as_json)
    names = {model.name for model in chosen}
    found = [row for row in model_list.rows(config) if not name or row.name in names]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    print_table(TITLES, [_cells(row) for row in found], right=("SIZE", "CTX", "USED"), leave=LEAVE)
    return 0


def _show_plans(config: Config, chosen: Sequence[ModelConfig], as_json: bool) -> int:
    """Print the plans; the exit code. One of several models that cannot be used does not keep back the others."""
    from starling.cli import plan  # imports numpy, which no other listing needs

    plans: dict[str, plan.Plan | None] = {}
    problems: dict[str, str] = {}
    for model in chosen:
        try:
            plans[model.name] = plan.plan(config, model, paths.models_dir())
        except (CheckpointError, StarlingError, OSError) as error:
            if len(chosen) == 1 and not isinstance(error, CheckpointError | FileNotFoundError):
                raise
            problems[model.name] = _problem(model, error)
    if problems and len(chosen) == 1:
        raise ConfigError(f"model {chosen[0].name!r}: {problems[chosen[0].name]}", "model")
    if as_json:
        found = [one for one in plans.values() if one is not None]
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        for name, problem in problems.items():
            complain(f"model {name!r}: {problem}")
        return EXIT_CONFIG if problems else 0
    for model in chosen:
        name, one = model.name, plans.get(model.name)
        missing = f"{name}  not prepared: run `starling prepare {name}` first"
        problem = f"{name}  cannot be used: {problems[name]}" if name in problems else missing
        for line in plan.lines(one) if one else [problem]:
            print_wrapped(line, PLAN_INDENT)
    return EXIT_CONFIG if problems else 0


def _problem(model: ModelConfig, error: Exception) -> str:
    """Why a model has no plan, with the remedy."""
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} is missing; run `starling prepare {model.name}`"
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read: {error.strerror}; check its permissions and the disk"
    return str(error)


def _cells(row: model_list.Row) -> list[str]:
    return [
        row.name,
        row.architecture or "-",
        size(row.bytes) if row.bytes else "-",
        row.quantization or "-",
        _thousands(row.context_length),
        row.digest[:12] or "-",
        row.state,
        duration(max(0.0, time.time() - row.last_used)) if row.last_used else "-",
    ]


def _thousands(count: int) -> str:
    return "-" if not count else f"{count // 1024}K" if count % 1024 == 0 else str(count)


@click.command(epilog=SHOWN)
@click.argument("name", shell_complete=completion.model_names)
@json_option()
def show(name: str, as_json: bool) -> None:
    """Show what is known of the model NAME."""
    row = _find(name)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(row)).decode())
        return
    for key, value in msgspec.to_builtins(row).items():
        if key in ("pulled", "last_used"):
            value = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else ""
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, int):
            value = f"{value:,}" if value else ""
        if value not in ("", None):
            print_wrapped(f"{key.replace('_', ' '):<16}{value}", 16)


def _find(name: str) -> model_list.Row:
    found = model_list.rows(load())
    row = next((row for row in found if row.name == name), None)
    if row is None:
        known = ", ".join(row.name for row in found)
        raise ModelNotFound(f"no model {name!r} is configured or pulled; there are {known}", "name")
    return row


@click.command(epilog=REMOVED)
@click.argument("name", shell_complete=completion.model_names)
def rm(name: str) -> None:
    """Remove the pulled model NAME.

    Its files go too unless another name has them. A model that is loaded is refused: `starling unload NAME` first.
    """
    config = load()
    folder = paths.models_dir()
    slug = name.replace("/", "--")
    if registry.read(folder, slug) is None:
        _find(name)
        raise ConfigError(f"{name!r} is configured and was not pulled: remove it from the configuration", "name")
    if any(version.name == name for version in model_list.loaded_versions(config)):
        raise ConfigError(f"{name!r} is loaded: `starling unload {name}` first", "name")
    with lock(folder, "names"):
        registry.remove(folder, slug)
    freed = sum(item.nbytes for item in _collect(model_list.rows(config), is_dry=False, only_models=True))
    print_wrapped(f"{name}: removed, {freed / 1e6:,.0f} MB freed", 2)


@click.command(epilog=CODES)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@json_option()
def gc(dry_run: bool, as_json: bool) -> None:
    """Remove files that no model needs.

    These are stored models without a name, converted models whose file is gone, prepared adapters, and unfinished
    downloads. Nothing that the running server has loaded is removed.
    """
    removed = _collect(model_list.rows(load()), dry_run)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([item._asdict() for item in removed])).decode())
        return
    for item in removed:
        print_wrapped(f"{item.reason}: {item.path} ({item.nbytes / 1e6:,.0f} MB)", 2)
    total = sum(item.nbytes for item in removed) / 1e6
    click.echo(f"{total:,.0f} MB {'would be' if dry_run else 'were'} freed")


def _collect(rows: list[model_list.Row], is_dry: bool, only_models: bool = False) -> list[collect.Item]:
    in_use = {row.digest for row in rows if row.digest}
    loaded = model_list.loaded_versions(load())
    in_use |= {version.digest for version in loaded}
    adapters = {digest for version in loaded for _, digest in version.adapters}
    return collect.collect(paths.models_dir(), in_use, is_dry, with_downloads=not only_models, adapters_in_use=adapters)
