"""Brings published models to this machine: what `pull`, `prepare` and `up` do for `catalog:NAME`.

Pieces of 8 MiB come from fleet.blobs and fleet.mirrors at once, and each is verified. An interrupted pull is continued.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import click

from pipeline.blobs.address import open_all
from pipeline.blobs.interface import BlobStore
from pipeline.catalog import contents
from pipeline.catalog.entry import Entry
from pipeline.catalog.pulled import is_usable, published_name
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ModelNotFound, StarlingError
from pipeline.models import store, versions
from shm.checkpoint import CheckpointError, load_index
from stages.agent.cache.eviction import Bounds
from stages.agent.cache.model_cache import ModelCache
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.model import Arrival, Context, download_model
from stages.agent.downloads.queue import DownloadQueue
from stages.agent.downloads.transfer import Limits
from starling import loaded_revisions
from starling.cli.progress import shown

AT_ONCE = 2  # downloads
MEGABYTE = 1 << 20


def pull_published(config: Config, names: Sequence[str], verify: bool, as_json: bool) -> list[dict[str, Any]]:
    """Bring the models called `names` here, and print what arrived; a row for each. Raises `StarlingError`."""
    with ExitStack() as stack:
        progress = {
            name: stack.enter_context(nullcontext(store.no_progress) if as_json else shown(name)) for name in names[:1]
        }
        found = asyncio.run(pull_all(config, names, lambda name: progress.get(name, store.no_progress), verify))
    if not as_json:
        for name, (_, arrival) in found.items():
            click.echo(f"{name}: {_summary(arrival)}")
    return [_row(name, entry, arrival) for name, (entry, arrival) in found.items()]


def pull_configured(config: Config, models: Iterable[ModelConfig], progress_of: Callable[[str], Any]) -> None:
    """Bring the published models among `models` that are not here. Raises `StarlingError`."""
    folder = paths.models_dir()
    missing = {published_name(one.path): one for one in models if published_name(one.path)}
    for name, model in missing.items():
        if not _is_here(model, folder):
            with progress_of(model.name) as progress:
                asyncio.run(pull_all(config, [name], lambda name, shown=progress: shown))  # type: ignore[misc]


async def pull_all(
    config: Config, names: Iterable[str], progress_of: Callable[[str], store.Progress], verify: bool = False
) -> dict[str, tuple[Entry, Arrival]]:
    """Bring models here, `AT_ONCE` at a time. Raises the first `StarlingError`, after the others have ended."""
    fleet = config.fleet
    bounds = Bounds(fleet.cache_mb * MEGABYTE, fleet.free_mb * MEGABYTE)
    context = Context(
        ModelCache(paths.models_dir(), bounds),
        Bandwidth(fleet.download_mb_per_s * MEGABYTE, time.monotonic),
        Limits(fleet.download_connections),
    )
    queue: DownloadQueue[Arrival] = DownloadQueue(AT_ONCE)
    pinned = pinned_digests(config)
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(one) for one in open_all(config)]

        async def one(name: str) -> tuple[Entry, Arrival]:
            entry = await _find(stores, name)
            arrival = await queue.wait_for(
                f"{entry.digest}/{name}",
                lambda: download_model(
                    context,
                    entry,
                    stores,
                    progress_of(name),
                    pinned=lambda: pinned,
                    verify=verify,
                    loaded=lambda: loaded_revisions.read(config),
                ),
            )
            return entry, arrival

        unique = list(dict.fromkeys(names))
        results = await asyncio.gather(*(one(name) for name in unique), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return {name: result for name, result in zip(unique, results, strict=True) if not isinstance(result, BaseException)}


def _is_here(model: ModelConfig, folder: Path) -> bool:
    """Whether the model is here with an index that this release can use; else the store may have one."""
    found = store.find(model, folder)
    try:
        return found is not None and is_usable(load_index(folder / f"{found.digest}.idx"))
    except (OSError, CheckpointError):
        return False


def pinned_digests(config: Config) -> set[str]:
    """Digests of the models that this machine is configured for, or serves."""
    folder = paths.models_dir()
    located = [store.find(model, folder) for model in config.models]
    served = [version.digest for version in versions.read(config).versions]
    return {one.digest for one in located if one is not None} | {digest for digest in served if digest}


async def _find(stores: list[BlobStore], name: str) -> Entry:
    """The entry, from the first store that answers. Raises the first store's error."""
    failure: StarlingError | None = None
    for one in stores:
        try:
            return await contents.find(one, name)
        except ModelNotFound:
            raise
        except StarlingError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _summary(arrival: Arrival) -> str:
    evicted = f", evicted {', '.join(key[:16] for key in arrival.evicted)}" if arrival.evicted else ""
    if arrival.report is None:
        done = "here already, with an index that was replaced" if arrival.has_new_index else "here already"
        return f"{arrival.index_path} ({done})"
    rejected = f", {arrival.report.rejected} damaged pieces fetched again" if arrival.report.rejected else ""
    return f"{arrival.index_path} ({arrival.report.received / 1e6:.0f} MB received{rejected}{evicted})"


def _row(name: str, entry: Entry, arrival: Arrival) -> dict[str, Any]:
    report = arrival.report
    return {
        "name": name,
        "digest": entry.digest,
        "path": str(arrival.index_path),
        "bytes": entry.nbytes,
        "received_bytes": report.received if report else 0,
        "rejected_pieces": report.rejected if report else 0,
        "has_new_index": arrival.has_new_index,
        "sources": {source: received for source, (received, _) in report.by_source.items()} if report else {},
        "evicted": arrival.evicted,
    }
