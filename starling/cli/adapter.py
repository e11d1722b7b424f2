"""`starling adapter list`, `load` and `unload`: the LoRA adapters of the models, and changes of a running server's."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load as load_config
from pipeline.config.schema import Config
from pipeline.errors import ModelNotFound
from starling import model_list
from starling.cli import completion, reload
from starling.cli.options import exit_codes, json_option, timeout_option
from starling.cli.status import size

TITLES = ("ADAPTER", "STATE", "RANK", "SIZE", "DIGEST", "PATH")
MEMORY = "not enough memory for the version, or the adapter's file is invalid"
CHANGED = exit_codes(
    {
        0: "success",
        1: "failure (the version that served before goes on serving), or no gateway answers",
        2: "no such model or adapter",
        78: MEMORY,
    }
)
_JSON = json_option("Print the result as JSON; `error` holds the reason of a failure.")


class Row(msgspec.Struct):
    """One adapter of a model. What is unknown is "" or 0."""

    name: str  # MODEL:ADAPTER, as requests ask for it
    model: str
    state: str  # loaded, loading, configured (its model is not loaded)
    path: str
    digest: str = ""
    rank: int = 0  # the largest of its matrices
    bytes: int = 0  # in memory


@click.group(epilog=exit_codes({0: "success", 1: "failure", 2: "no such model or adapter", 78: MEMORY}))
def adapter() -> None:
    """List, load and unload LoRA adapters.

    Requests ask for an adapter as MODEL:NAME. Adapters that are to be there at every start belong in the configuration
    (models[].adapters).
    """


@adapter.command("list", epilog=exit_codes({0: "success", 2: "no such model", 78: "the configuration is wrong"}))
@click.argument("model", required=False, shell_complete=completion.model_names)
@json_option()
def list_adapters(model: str | None, as_json: bool) -> None:
    """List the adapters of MODEL, or of all models.

    \b
    loaded       requests can name it
    loading      the server loads it, or another version of its model
    configured   it is loaded together with its model
    """
    from starling.cli.tables import print_table

    found = rows(load_config(), model)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    print_table(TITLES, [_cells(one) for one in found], right=("RANK", "SIZE"))


def _cells(one: Row) -> list[str]:
    occupied = size(one.bytes) if one.bytes else "-"
    return [one.name, one.state, str(one.rank or "-"), occupied, one.digest[:12] or "-", one.path]


@adapter.command(epilog=CHANGED)
@click.argument("name", metavar="MODEL:NAME")
@click.argument("path", type=click.Path(), metavar="FILE")
@click.option("--replace", is_flag=True, help="Replace the adapter of that name, if there is one.")
@timeout_option(reload.LOAD_TIMEOUT_S, "How long the model may take to be ready with the adapter.")
@_JSON
def load(name: str, path: str, replace: bool, timeout: float, as_json: bool) -> int:
    """Add an adapter to a loaded model.

    Requests ask for it as MODEL:NAME. FILE is a GGUF file, or a directory of the PEFT library, on the server's machine.
    Requests in flight finish as they began.
    """
    _check_name(name)
    is_there = replace and any(one.name == name for one in rows(load_config(), None))
    return reload.run("reload" if is_there else "load", name, timeout, as_json, path=reload.absolute(path))


@adapter.command(epilog=CHANGED)
@click.argument("name", metavar="MODEL:NAME")
@timeout_option(reload.LOAD_TIMEOUT_S, "How long the model may take to be ready without the adapter.")
@_JSON
def unload(name: str, timeout: float, as_json: bool) -> int:
    """Remove an adapter from a loaded model.

    New requests for MODEL:NAME get 404. Those in flight finish.
    """
    _check_name(name)
    return reload.run("unload", name, timeout, as_json)


def _check_name(name: str) -> None:
    """Raise `click.UsageError` unless the name has a model and an adapter."""
    model, _, adapter_name = name.partition(":")
    if not model or not adapter_name:
        raise click.UsageError(f"the adapter is {name!r}; it must be MODEL:NAME")


def rows(config: Config, model: str | None) -> list[Row]:
    """The adapters of a model, or of all: of the running server, and of configured models that it has not loaded.

    Raises `ModelNotFound`.
    """
    loaded = model_list.loaded_versions(config)
    known = [one.name for one in model_list.known(config)] + [version.name for version in loaded]
    if model is not None and model not in known:
        raise ModelNotFound(f"no model {model!r} is configured or loaded; there are {', '.join(known)}", "model")
    found: dict[str, Row] = {}
    for version in sorted(loaded, key=lambda one: one.state != "serving"):
        digests = dict(version.adapters)
        for one in version.settings.adapters if version.state != "retiring" else ():
            name = f"{version.name}:{one.name}"
            state = "loaded" if version.state == "serving" and one.name in digests else "loading"
            found.setdefault(name, _row(name, state, one.path, digests.get(one.name, "")))
    served = {version.name for version in loaded}
    for configured in config.models:
        for one in configured.adapters if configured.name not in served else ():
            name = f"{configured.name}:{one.name}"
            found[name] = _row(name, "configured", one.path, "")
    return [row for row in found.values() if model in (None, row.model)]


def _row(name: str, state: str, path: str, digest: str) -> Row:
    row = Row(name, name.partition(":")[0], state, path, digest)
    if digest:
        from stages.worker.adapters.prepared import ADAPTERS, open_prepared  # imports numpy

        prepared = open_prepared(Path(paths.models_dir()) / ADAPTERS, digest)
        if prepared is not None:
            row.rank, row.bytes = prepared.max_rank, prepared.header.nbytes
    return row
