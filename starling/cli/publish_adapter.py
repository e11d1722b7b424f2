"""Puts a LoRA adapter into a fleet's blob store, beside its model: `starling publish FILE --name MODEL:ADAPTER`."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.api.adapter_names import adapter_of, base_of
from pipeline.blobs.address import open_store
from pipeline.blobs.interface import BlobStore
from pipeline.blobs.retry import retried
from pipeline.catalog import adapters, contents, pulled_adapters
from pipeline.catalog.adapter_entry import MAX_ADAPTER_BYTES, AdapterEntry, check_adapter_names
from pipeline.catalog.adapters import PublishedAdapter
from pipeline.catalog.entry import Entry
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError, StorageUnavailable
from shm.checkpoint import CheckpointError, Index, load_index


def publish_adapter(config: Config, file: str, name: str, replace: bool) -> PublishedAdapter:
    """Publish the adapter that FILE names as MODEL:ADAPTER. Raises `click.BadParameter`, `StarlingError`."""
    if reason := check_adapter_names(name):
        raise click.BadParameter(f"{name!r} cannot be the name of an adapter: {reason}", param_hint="--name")
    return asyncio.run(_publish(config, _path_of(config, file), name, replace))


def _path_of(config: Config, file: str) -> Path:
    """The file or directory. Raises `click.BadParameter`."""
    path = expand_user(file)
    if path.exists():
        return path.absolute()
    model = config.model(base_of(file))
    configured = {one.name: one.path for one in model.adapters} if model is not None else {}
    if adapter_of(file) in configured:
        return expand_user(configured[adapter_of(file)]).absolute()
    raise click.BadParameter(
        f"{file!r} is no GGUF file, no directory of the PEFT library, and no adapter of the configuration",
        param_hint="FILE",
    )


async def _publish(config: Config, path: Path, name: str, replace: bool) -> PublishedAdapter:
    from stages.worker.adapters.prepared import ADAPTERS, MAX_HEADER, prepare_adapter

    base = base_of(name)
    models_dir = paths.models_dir()
    settings = config.model(base) or ModelConfig(name=base)
    async with open_store(config) as store:
        model = await contents.find(store, base)
        index = await _index_of(store, model, models_dir)
        most = min(settings.adapters_mb << 20, MAX_ADAPTER_BYTES - MAX_HEADER)
        prepared = await asyncio.to_thread(
            prepare_adapter, path, index, models_dir / ADAPTERS, settings.max_adapter_rank, most
        )
        raw = await asyncio.to_thread(pulled_adapters.file_path(models_dir, prepared.digest).read_bytes)
        entry = AdapterEntry(
            base=base,
            adapter=adapter_of(name),
            base_digest=model.digest,
            digest=prepared.digest,
            bytes=len(raw),
            rank=prepared.max_rank,
            source=path.name[:512],
            published=int(time.time()),
        )
        return await adapters.publish(store, entry, raw, replace=replace)


async def _index_of(store: BlobStore, model: Entry, models_dir: Path) -> Index:
    """The index of a published model: the one that is here, or else the published one. Raises `StarlingError`."""
    try:
        return await asyncio.to_thread(load_index, models_dir / f"{model.digest}.idx")
    except (OSError, CheckpointError):
        pass
    raw = await retried(lambda: store.get(model.index_key, 0, model.index_bytes))
    if hashlib.sha256(raw).hexdigest() != model.index_sha256:
        raise StorageUnavailable(f"{store.address}/{model.index_key} is damaged; publish {model.name!r} again")
    with tempfile.TemporaryDirectory(prefix="starling-publish-") as folder:
        path = Path(folder) / f"{model.digest}.idx"
        path.write_bytes(raw)
        try:
            return await asyncio.to_thread(load_index, path)
        except CheckpointError as error:
            raise ConfigError(f"{store.address}/{model.index_key}: {error}; publish {model.name!r} again") from None


def show_published(done: PublishedAdapter, as_json: bool) -> None:
    """Print what a publication did."""
    entry, kept = done.entry, done.entry.bytes - done.sent
    if as_json:
        click.echo(msgspec.json.encode({**adapter_row(entry), "sent_bytes": done.sent, "kept_bytes": kept}))
        return
    sent = f"{done.sent / 1e6:.1f} MB sent, {kept / 1e6:.1f} MB there already"
    click.echo(f"{entry.name}: published as {entry.digest} ({sent})")


def adapter_row(entry: AdapterEntry) -> dict[str, Any]:
    """An entry as JSON shows it."""
    return {**msgspec.to_builtins(entry), "name": entry.name, "parent": entry.base}
