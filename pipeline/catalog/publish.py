"""Puts a prepared model into a blob store.

Every byte is compared with its checksum before it is sent.  The order makes a half-published model invisible: parts of
the `.bin`, then the index, then the manifest, then the listing.  What is in the store already is not sent again: a
repeated publication sends nothing, and one after an interruption sends what was missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.blobs.interface import BlobStore
from pipeline.blobs.retry import retried
from pipeline.catalog import contents
from pipeline.catalog.contents import write_listing
from pipeline.catalog.entry import PART_BYTES, Entry, Source, decode, encode, manifest_key
from pipeline.errors import ConfigError, Conflict
from pipeline.threads import uninterrupted
from shm.checkpoint import PIECE_BYTES, VERSION, CheckpointError, Index, bin_path, load_index, piece_checksum

Progress = Callable[[str, int, int], None]  # phase, done, total (bytes)
PHASE = "publish"
PARTS_AT_ONCE = 4  # 128 MiB of memory


class Published(NamedTuple):
    """What a publication did."""

    entry: Entry
    sent: int  # bytes
    kept: int  # bytes that were in the store already


def describe(
    index_path: Path, name: str, source_file: str, published: int, part_bytes: int
) -> tuple[Entry, Index, bytes]:
    """The entry of a prepared model, its index, and the bytes of the index. Raises `ConfigError`."""
    try:
        index = load_index(index_path)
        raw = index_path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{index_path} does not exist; run `starling prepare` first") from None
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if index.version != VERSION:
        raise ConfigError(f"{index_path} is of an older version; run `starling prepare` first")
    entry = Entry(
        name=name,
        digest=index.digest,
        source=Source(
            file=source_file[:512],
            bytes=index.source_bytes,
            title=index.name[:512],
            architecture=index.architecture,
            parameters=index.parameters,
        ),
        index_sha256=hashlib.sha256(raw).hexdigest(),
        index_bytes=len(raw),
        weights_bytes=index.bin_bytes,
        weights_checksum=index.pieces_digest,
        part_bytes=part_bytes,
        published=published,
    )
    return entry, index, raw


async def publish(
    store: BlobStore,
    index_path: Path,
    name: str,
    source_file: str,
    published: int,
    progress: Progress,
    *,
    replace: bool = False,
    part_bytes: int = PART_BYTES,
) -> Published:
    """Publish the model of `index_path` as `name`.

    published: s since 1970.  replace: whether the name may change to another model.
    part_bytes: a multiple of `PIECE_BYTES`.

    Raises `ConfigError` (not prepared, damaged, refused by the store), `Conflict` (the name has another model),
    `ResourceError` (the store is full), `StorageUnavailable`.
    """
    entry, index, raw = await asyncio.to_thread(describe, index_path, name, source_file, published, part_bytes)
    current = await contents.current(store, manifest_key(name), decode, replace)
    if current is not None and not current.same_model(entry) and not replace:
        raise _taken(entry, current)
    sent = 0
    # Blobs that another command removes meanwhile are sent in another round, before the entry counts as published.
    for _ in range(3):
        found = {blob.key: blob.nbytes for blob in await retried(lambda: store.scan(entry.folder))}
        missing = {key for key, nbytes in entry.blobs().items() if found.get(key) != nbytes}
        if not missing and current is not None and current.same_model(entry):
            break
        sent += await _send(store, entry, index, raw, bin_path(index_path), missing, progress)
        await _place_manifest(store, entry, replace)
        current = entry
    else:
        raise Conflict(f"blobs of {name!r} are removed while they are published; run `starling publish` again")
    await write_listing(store)
    assert current is not None
    return Published(current, sent, entry.nbytes - min(sent, entry.nbytes))


async def _send(
    store: BlobStore, entry: Entry, index: Index, raw: bytes, weights: Path, missing: set[str], progress: Progress
) -> int:
    """Send the missing blobs, the index last; the bytes sent."""
    numbers = [part for part in range(entry.n_parts) if entry.part_key(part) in missing]
    total = entry.nbytes
    done = total - sum(entry.part_size(part) for part in numbers) - entry.index_bytes
    sent = 0
    progress(PHASE, done, total)
    queue = iter(numbers)

    async def sender(file: int) -> None:
        nonlocal done, sent
        for part in queue:
            data = await uninterrupted(_read_part, file, weights, entry, index, part)
            await retried(partial(contents.put_once, store, entry.part_key(part), data))
            done += len(data)
            sent += len(data)
            progress(PHASE, done, total)

    if numbers:
        try:
            file = os.open(weights, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{weights}: {error.strerror}; run `starling prepare` again") from None
        try:
            await _together([sender(file) for _ in range(PARTS_AT_ONCE)])
        finally:
            os.close(file)
    if entry.index_key in missing:
        await retried(lambda: contents.put_once(store, entry.index_key, raw))
        sent += len(raw)
    progress(PHASE, total, total)
    return sent


async def _together(work: list[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error ends the others and passes."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _place_manifest(store: BlobStore, entry: Entry, replace: bool) -> None:
    current = await contents.current(store, manifest_key(entry.name), decode, replace)
    if current is not None and current.same_model(entry):
        return
    try:
        # Without `replace` one of two publishers gets Conflict, whatever both have read before.
        await retried(lambda: store.put(manifest_key(entry.name), encode(entry), replace=replace))
    except Conflict:
        current = await contents.current(store, manifest_key(entry.name), decode, replace)
        if current is None or not current.same_model(entry):
            raise (_taken(entry, current) if current else Conflict(f"{entry.name!r} is being removed")) from None


def _taken(entry: Entry, current: Entry) -> Conflict:
    return Conflict(
        f"{entry.name!r} is published with another model ({current.source.file}, SHA-256 {current.digest[:16]}...; "
        f"this one has {entry.digest[:16]}...): choose another --name, or give --replace",
        "name",
    )


def _read_part(file: int, path: Path, entry: Entry, index: Index, part: int) -> bytes:
    """The bytes of a part, each piece compared with its checksum. Raises `ConfigError`."""
    at, data = part * entry.part_bytes, bytearray()
    while len(data) < entry.part_size(part):
        try:
            chunk = os.pread(file, entry.part_size(part) - len(data), at + len(data))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; check the disk") from None
        if not chunk:
            # Parts are read side by side: the first that finds the end may lie wholly behind it.
            held = os.fstat(file).st_size
            raise ConfigError(f"{path} ends at {held:,} of {entry.weights_bytes:,} bytes; {_REMEDY}")
        data += chunk
    view = memoryview(data)
    for begin in range(0, len(data), PIECE_BYTES):
        piece = (at + begin) // PIECE_BYTES
        if piece_checksum(view[begin : begin + PIECE_BYTES]) != index.pieces[piece]:
            raise ConfigError(f"{path}: piece {piece} differs from its checksum: the file is damaged; {_REMEDY}")
    return bytes(data)


_REMEDY = "check the disk, remove the .idx, and run `starling prepare` again"
