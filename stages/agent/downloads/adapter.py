"""Brings one published LoRA adapter to this machine: its file, verified by its SHA-256, and the entry of its name.

The file is small beside its model's, and is read from one source at a time.  It gets its name only with the right
bytes; one that is here and differs is fetched again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipeline.blobs.retry import retried
from pipeline.catalog import pulled_adapters
from pipeline.catalog.adapter_entry import AdapterEntry
from pipeline.errors import ConfigError, NotFound, StarlingError
from pipeline.files import make_directory
from stages.agent.disk_threads import MODELS
from stages.agent.downloads.model import Context, locked
from stages.agent.downloads.part_file import disk_error

CHUNK_BYTES = 8 << 20  # of one request
PART = ".lora.part"


class AdapterSource(NamedTuple):
    """Where its bytes come from. `read(offset, nbytes)` raises `StarlingError`."""

    name: str
    read: Callable[[int, int], Awaitable[bytes]]


async def bring_adapter(
    context: Context,
    entry: AdapterEntry,
    sources: Sequence[AdapterSource],
    pinned: Callable[[], Collection[str]] = tuple,
) -> Path:
    """The adapter's file. `pinned`: digests of models and adapters that are not evicted for it, when room is made.

    Raises `NotFound`, `ConfigError` (no source has the right bytes), `ResourceError`, `StorageUnavailable`.
    """
    models_dir = context.cache.models_dir
    path = pulled_adapters.file_path(models_dir, entry.digest)
    async with locked(models_dir, entry.digest, context.sleep):
        is_here = await MODELS.run(digest_of, path) == entry.digest
        if not is_here:
            await MODELS.run(context.cache.make_room_for_adapter, entry, {*pinned(), entry.digest})
        try:
            # Before the file: a process that is killed leaves none that no entry names.
            await MODELS.uninterrupted(context.cache.record_adapter, entry, {*pinned(), entry.digest})
        except OSError as error:
            raise disk_error(error, path, 0) from None
        if not is_here:
            try:
                await _fetch(context, entry, sources, path)
            except StarlingError:
                await MODELS.uninterrupted(context.cache.remove_adapter, entry.digest)
                raise
    return path


async def _fetch(context: Context, entry: AdapterEntry, sources: Sequence[AdapterSource], path: Path) -> None:
    """From the first source that gives the right bytes. Raises the last one's error."""
    failure: StarlingError = ConfigError(f"{entry.name!r} has no source; set fleet.blobs", "fleet.blobs")
    part = context.cache.models_dir / ".fetch" / f"{entry.digest}{PART}"
    try:
        for source in sources:
            try:
                if await _receive(context, entry, source, part) == entry.digest:
                    await MODELS.uninterrupted(_place, part, path)
                    return
                failure = ConfigError(
                    f"{source.name}/{entry.key} does not have the SHA-256 in its name: remove the adapter with "
                    f"`starling unpublish {entry.name}`, and publish it again",
                    "fleet.blobs",
                )
            except (NotFound, ConfigError) as error:
                failure = error
            except OSError as error:
                raise disk_error(error, path, entry.bytes) from None
    finally:
        with contextlib.suppress(OSError):
            await MODELS.uninterrupted(partial(part.unlink, missing_ok=True))
    raise failure


async def _receive(context: Context, entry: AdapterEntry, source: AdapterSource, part: Path) -> str:
    """Write what a source has; its SHA-256. Raises `OSError`, `StarlingError`."""
    found = hashlib.sha256()
    opened = contextlib.ExitStack()  # also closes what is opened for a caller that is cancelled meanwhile
    try:
        file = await MODELS.uninterrupted(lambda: opened.enter_context(_open(part)))
        for offset in range(0, entry.bytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, entry.bytes - offset)
            if delay_s := context.bandwidth.delay_s(nbytes):
                await context.sleep(delay_s)
            data = await retried(lambda at=offset, n=nbytes: source.read(at, n), sleep=context.sleep)  # type: ignore[misc]
            await MODELS.uninterrupted(file.write, data)
            found.update(data)
        await MODELS.uninterrupted(file.flush)
        await MODELS.uninterrupted(os.fsync, file.fileno())
    finally:
        await MODELS.uninterrupted(opened.close)
    return found.hexdigest()


def _open(part: Path) -> BinaryIO:
    make_directory(part.parent)
    return part.open("wb")


def _place(part: Path, path: Path) -> None:
    make_directory(path.parent)
    part.replace(path)


def digest_of(path: Path) -> str:
    """SHA-256 of a file; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
