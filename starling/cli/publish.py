"""`starling publish`, `starling unpublish` and `starling catalog`: models and adapters in the blob store of a fleet."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.api.adapter_names import sort_key
from pipeline.blobs.address import open_store
from pipeline.catalog import adapters, contents
from pipeline.catalog.adapter_entry import AdapterEntry, check_adapter_names
from pipeline.catalog.entry import Entry
from pipeline.catalog.publish import Published
from pipeline.catalog.publish import publish as publish_model
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.rules import check_name
from pipeline.config.schema import Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.models import store
from starling import loaded_revisions
from starling.cli import completion, terminal
from starling.cli.options import exit_codes, json_option
from starling.cli.progress import shown
from starling.cli.publish_adapter import adapter_row, publish_adapter, show_published
from starling.cli.terminal import print_wrapped

CODES = {
    0: "success",
    1: "failure that a retry may cure: the store, the network, or another model has the name",
    2: "no such file or model",
    78: "the file, the configuration or the store must be changed first",
}


@click.command(epilog=exit_codes(CODES))
@click.argument("file", shell_complete=completion.models_or_files)
@click.option("--name", help="What requests ask for; by default the configured name, or the name of the file.")
@click.option("--replace", is_flag=True, help="Publish even if the name has another model now.")
@json_option()
def publish(file: str, name: str | None, replace: bool, as_json: bool) -> None:
    """Put a model or an adapter into the blob store.

    FILE is a GGUF file or a configured model. It is prepared first if necessary: what is published is the checkpoint,
    which other machines map as it is. Repeated, the command sends only what the store lacks.

    With --name MODEL:ADAPTER, FILE is a LoRA adapter of the published MODEL: a GGUF file, or a directory of the PEFT
    library. FILE may also be MODEL:ADAPTER of the configuration.
    """
    config = load()
    names_adapter = name is None and not check_adapter_names(file) and not Path(file).exists()
    adapter = file if names_adapter else name
    if adapter is not None and ":" in adapter:
        show_published(publish_adapter(config, file, adapter, replace), as_json)
        return
    model = _model(config, file, name)
    with nullcontext(store.no_progress) if as_json else shown(model.name) as progress:
        index_path = _prepare(config, model, progress)
        source = store.gguf_path(model, paths.models_dir()).name
        done = asyncio.run(_publish(config, index_path, model.name, source, progress, replace))
    if as_json:
        click.echo(msgspec.json.encode({**_row(done.entry), "sent_bytes": done.sent, "kept_bytes": done.kept}))
        return
    sent = f"{done.sent / 1e6:.0f} MB sent, {done.kept / 1e6:.0f} MB there already"
    click.echo(f"{model.name}: published as {done.entry.digest} ({sent})")


def publish_configured(config: Config, model: ModelConfig) -> None:
    """Publish a configured model under its name, unless it is what a catalog has. Raises `StarlingError`."""
    if model.path.startswith("catalog:"):
        return
    with shown(model.name) as progress:
        index_path = _prepare(config, model, progress)
        source = store.gguf_path(model, paths.models_dir()).name
        asyncio.run(_publish(config, index_path, model.name, source, progress, replace=False))


def _prepare(config: Config, model: ModelConfig, progress: store.Progress) -> Path:
    from stages.worker.checkpoint.attention_factor import apply_factor
    from stages.worker.checkpoint.prepare import prepare_checkpoint
    from starling.directory_conversion import conversion_of

    folder = paths.models_dir()
    conversion = conversion_of(folder, model.pretokenizer, terminal.note)
    index_path = prepare_checkpoint(model, folder, progress, allowed=config.registry.sources, conversion=conversion)
    apply_factor(model, index_path, lambda: loaded_revisions.read(config), progress)
    return index_path


async def _publish(
    config: Config, index_path: Path, name: str, source: str, progress: store.Progress, replace: bool
) -> Published:
    async with open_store(config) as blobs:
        return await publish_model(blobs, index_path, name, source, int(time.time()), progress, replace=replace)


def _model(config: Config, file: str, name: str | None) -> ModelConfig:
    """The model that FILE names. Raises `click.BadParameter`."""
    path = expand_user(file)
    named = config.model(file)
    if path.is_file():
        folder = paths.models_dir()
        found = next((one for one in config.models if _is_same(store.gguf_path(one, folder), path)), None)
        model = found or ModelConfig(name=_name_of(path), path=str(path.absolute()))
    elif named is not None:
        model = named
    else:
        known = ", ".join(one.name for one in config.models)
        raise click.BadParameter(f"{file!r} is neither a file nor a configured model ({known})", param_hint="FILE")
    chosen = name or model.name
    if reason := check_name(chosen):
        raise click.BadParameter(f"{chosen!r} cannot be a model's name: {reason}", param_hint="--name")
    if model.path or chosen == model.name:
        return msgspec.structs.replace(model, name=chosen)
    # The demo model is known by its own name only; under another one it is the file.
    located = store.fetch(model, paths.models_dir(), allowed=config.registry.sources)
    return msgspec.structs.replace(model, name=chosen, path=str(located.path))


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _name_of(path: Path) -> str:
    """A model's name from a file's."""
    return re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("-._") or "model"


@click.command(epilog=exit_codes(CODES))
@click.argument("name", shell_complete=completion.published_models)
def unpublish(name: str) -> None:
    """Remove a model or an adapter from the fleet's blob store.

    NAME is a model or MODEL:ADAPTER that `starling catalog` lists. Its blobs are removed with it, unless another entry
    of the catalog uses them, and the adapters of a model. Machines keep what they have received.
    """

    async def remove() -> int:
        async with open_store(config) as blobs:
            if ":" in name:
                return await adapters.remove(blobs, name)
            # Its adapters first: interrupted in between, the command can be repeated.
            freed = await adapters.remove_all_of(blobs, name)
            return freed + (await contents.remove(blobs, name))[1]

    config = load()
    freed = asyncio.run(remove())
    click.echo(f"{name}: removed ({freed / 1e6:.0f} MB)")


@click.command(epilog=exit_codes({0: "success", 1: CODES[1], 78: CODES[78]}))
@json_option()
def catalog(as_json: bool) -> None:
    """List the published models and adapters."""

    async def read() -> tuple[str, list[Entry], list[AdapterEntry]]:
        async with open_store(config) as blobs:
            found = await contents.entries(blobs)
            return blobs.address, found, [one for one, _ in adapters.usable(await adapters.entries(blobs), found)]

    config = load()
    address, found, of_models = asyncio.run(read())
    if as_json:
        rows = [_row(entry) for entry in found] + [adapter_row(entry) for entry in of_models]
        rows.sort(key=lambda row: sort_key(row["name"]))
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    if not found:
        print_wrapped(f"nothing is published at {address}; `starling publish FILE` does that", 2)
    for entry in found:
        facts = f"{entry.source.architecture}, {entry.source.parameters / 1e6:.0f}M parameters, {entry.source.file}"
        print_wrapped(f"{entry.name}  {entry.nbytes / 1e6:.0f} MB  {facts}", 2)
        print_wrapped(f"  sha256 {entry.digest}", 2)
        for one in of_models:
            if one.base == entry.name:
                print_wrapped(f"{one.name}  {one.bytes / 1e6:.1f} MB  adapter, rank {one.rank}, {one.source}", 2)
                print_wrapped(f"  sha256 {one.digest}", 2)


def _row(entry: Entry) -> dict[str, Any]:
    """An entry as JSON shows it."""
    return {**msgspec.to_builtins(entry), "bytes": entry.nbytes, "pieces": entry.n_pieces}
