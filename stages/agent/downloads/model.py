"""Brings one published model to this machine: its index, room for it, the pieces of the `.bin`, and its place.

A right `.bin` with an index that this release cannot use is kept, and gets the published index.

The record of its name is written first, the `.idx` is placed last: a process that finds an index can use it, and what a
crash leaves in between can be evicted.  A `.bin` that is here without being right (a damaged one, or one that a crash
left without its index) is the first source of the new one, so that only its damaged pieces are fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from pipeline.blobs.interface import BlobStore
from pipeline.blobs.retry import ATTEMPTS, delay_s
from pipeline.catalog import pulled
from pipeline.catalog.entry import Entry
from pipeline.errors import ConfigError, DiskFailed, NotFound, StarlingError, StorageUnavailable
from pipeline.files import replace_file
from pipeline.models import locks
from shm.checkpoint import PIECE_BYTES, CheckpointError, Index, load_index, piece_checksum
from stages.agent.cache.model_cache import ModelCache, lock_path
from stages.agent.disk_threads import MODELS
from stages.agent.downloads.arriving import Showcase
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.part_file import PartFile, disk_error
from stages.agent.downloads.sources import FileSource, Source, StoreSource
from stages.agent.downloads.transfer import Clock, Limits, Sharing, Sleep, Transfer, TransferReport

PHASE = "download"
LOCK_POLL_S = 0.1

Progress = Callable[[str, int, int], None]  # phase, done, total (bytes)
Loaded = Callable[[], Collection[tuple[str, int]]]  # returns digest and `Hyper.kv_revision` of each loaded version


class Arrival(NamedTuple):
    """What a download did. `report` is None if the weights were here already."""

    index_path: Path
    report: TransferReport | None
    evicted: list[str]
    has_new_index: bool = False  # for the weights that were here


class Exchange(Protocol):
    """Gives the pieces of downloads to other agents, and finds theirs (stages/agent/peers)."""

    def join(
        self, entry: Entry, path: Path, checksums: list[int], progress: Transfer
    ) -> contextlib.AbstractAsyncContextManager[Sharing]:
        """While a download runs."""


class Context(NamedTuple):
    """What the downloads of a process have in common."""

    cache: ModelCache
    bandwidth: Bandwidth
    limits: Limits = Limits()
    clock: Clock = time.monotonic
    sleep: Sleep = asyncio.sleep
    jitter: Callable[[], float] = random.random
    exchange: Exchange | None = None  # with other agents


async def download_model(
    context: Context,
    entry: Entry,
    stores: list[BlobStore],
    progress: Progress,
    *,
    pinned: Callable[[], Collection[str]] = tuple,
    verify: bool = False,
    showcase: Showcase | None = None,
    loaded: Loaded = tuple,
) -> Arrival:
    """Bring a model here unless it is; `verify` reads it then, and repairs it.

    stores: where it may be fetched from.  pinned: digests that are not evicted for it, when there must be room.
    showcase: shows the file to an engine while it is downloaded.
    loaded: models that a server has loaded: its workers read the index when they start again, so none with another
        revision is placed.
    Raises `NotFound`, `ConfigError`, `ResourceError`, `StorageUnavailable`, of which `DiskFailed`; what has arrived is
    kept.
    """
    models_dir = context.cache.models_dir
    index_path = models_dir / f"{entry.digest}.idx"
    async with locked(models_dir, entry.digest, context.sleep):
        here = await MODELS.uninterrupted(pulled.index_of, models_dir, entry)
        if here is not None and not verify and await MODELS.uninterrupted(pulled.is_best, models_dir, entry, here):
            await MODELS.uninterrupted(_record, models_dir, entry, False)
            return Arrival(index_path, None, [])
        raw, index = await _fetch_index(entry, stores, context)
        if here is not None and (not verify or await _is_right(index_path.with_suffix(".bin"), index, progress)):
            is_replaced = await MODELS.uninterrupted(_renew, index_path, here, index, raw, entry, loaded)
            return Arrival(index_path, None, [], is_replaced)
        await MODELS.uninterrupted(_check_loaded, entry, index, loaded)
        kept = {*pinned(), entry.digest}
        try:
            evicted = await MODELS.run(context.cache.make_room, entry.digest, entry.nbytes, kept)
        except OSError as error:
            raise disk_error(error, models_dir, entry.nbytes) from None
        sources: list[Source] = [StoreSource(store, entry) for store in stores]
        weights = index_path.with_suffix(".bin")
        if weights.is_file():
            sources.insert(0, FileSource(weights))
        async with _part(context.cache.part_path(entry.digest), entry.weights_bytes) as part:
            reports = _Reports(progress)
            transfer = Transfer(
                part,
                index.pieces,
                sources,
                context.bandwidth,
                context.limits,
                clock=context.clock,
                sleep=context.sleep,
                jitter=context.jitter,
                progress=reports.on_pieces,
            )
            async with (
                _joined(context.exchange, entry, part.path, index.pieces, transfer),
                _shown(showcase, part.path, index, raw, transfer) as reports.advance,
            ):
                report = await transfer.run()
                reports.advance()  # of a file that was here already
                await MODELS.uninterrupted(_place, part, index_path, index, raw, entry, here is None, loaded)
        return Arrival(index_path, report, evicted)


@contextlib.asynccontextmanager
async def _part(path: Path, nbytes: int) -> AsyncIterator[PartFile]:
    """The unfinished file. Some file systems reserve its size block by block, and write it when it is closed."""
    opened = contextlib.ExitStack()  # also closes what is opened for a caller that is cancelled meanwhile
    try:
        yield await MODELS.uninterrupted(lambda: opened.enter_context(PartFile(path, nbytes)))
    finally:
        await MODELS.uninterrupted(opened.close)


@contextlib.asynccontextmanager
async def _joined(
    exchange: Exchange | None, entry: Entry, path: Path, checksums: list[int], transfer: Transfer
) -> AsyncIterator[None]:
    """Share a transfer with other agents, if it is one of an agent."""
    if exchange is None:
        yield
        return
    async with exchange.join(entry, path, checksums, transfer) as transfer.sharing:
        yield


@contextlib.asynccontextmanager
async def _shown(
    showcase: Showcase | None, path: Path, index: Index, raw: bytes, transfer: Transfer
) -> AsyncIterator[Callable[[], None]]:
    """Show a transfer to an engine, if one waits for it."""
    if showcase is None:
        yield _nothing
        return
    async with showcase.shown(path, index, raw, lambda: transfer.present) as on_pieces:
        yield on_pieces


def _nothing() -> None:
    pass


class _Reports:
    """What follows the pieces of a transfer."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.advance: Callable[[], None] = _nothing

    def on_pieces(self, done: int, total: int) -> None:
        """Pieces have arrived; in bytes."""
        self._progress(PHASE, done, total)
        self.advance()


def _check_loaded(entry: Entry, published: Index, loaded: Loaded) -> None:
    """Raise `ConfigError` if a server has the model loaded with another K and V than the published index has."""
    others = {revision for digest, revision in loaded() if digest == entry.digest} - {published.hyper.kv_revision}
    if others:
        raise ConfigError(
            f"{entry.name!r} is loaded with KV revision {min(others)}, and the published index has revision "
            f"{published.hyper.kv_revision}: with that the server's workers could not start again; `starling unload` "
            "it first, or stop the server, and load it when the index is here",
            "name",
        )


async def _is_right(path: Path, index: Index, progress: Progress) -> bool:
    """Whether every piece of a `.bin` has its checksum. Reads it up to the first one that has not."""
    file = FileSource(path)
    for piece, expected in enumerate(index.pieces):
        offset = piece * PIECE_BYTES
        nbytes = min(PIECE_BYTES, index.bin_bytes - offset)
        try:
            data = await file.read(offset, nbytes)
        except StarlingError:
            return False
        if await asyncio.to_thread(piece_checksum, data) != expected:
            return False
        progress("verify", offset + nbytes, index.bin_bytes)
    return True


def _place(
    part: PartFile, index_path: Path, index: Index, raw: bytes, entry: Entry, is_new: bool, loaded: Loaded
) -> None:
    """Record the name and place the pair, which could not be removed without a record. Raises `StarlingError`."""
    _record(index_path.parent, entry, is_new)
    _check_loaded(entry, index, loaded)  # again: a server may have started while the weights came
    try:
        index_path.unlink(missing_ok=True)  # of other contents: it must not belong to the new .bin, even for a moment
        part.place(index_path.with_suffix(".bin"))
        replace_file(index_path, raw, durable=True, mode=0o444)
    except OSError as error:
        raise disk_error(error, index_path, len(raw)) from None


def _renew(index_path: Path, here: Index, published: Index, raw: bytes, entry: Entry, loaded: Loaded) -> bool:
    """Record the name, and give right weights the published index; whether that replaced another one.

    One that this release can use stays if the published one is older, or if it was prepared here.  Processes that map
    the old file keep it.  Raises `StarlingError`.
    """
    is_owned = _record(index_path.parent, entry, False)
    before, after = ((pulled.is_usable(index), index.version) for index in (here, published))
    if after < before or (before[0] and not is_owned):
        return False
    try:
        if index_path.read_bytes() == raw:
            return False
    except OSError as error:
        raise disk_error(error, index_path, len(raw)) from None
    _check_loaded(entry, published, loaded)
    try:
        replace_file(index_path, raw, durable=True, mode=0o444)
    except OSError as error:
        raise disk_error(error, index_path, len(raw)) from None
    return True


def _record(models_dir: Path, entry: Entry, is_new: bool) -> bool:
    """Record the name; whether the checkpoint was pulled.

    One that was here without a record was prepared here and stays its owner's.
    """
    same = [record for record, _ in pulled.read_all(models_dir) if record.entry.digest == entry.digest]
    is_owned = is_new or any(record.is_owned for record in same)
    try:
        pulled.write(models_dir, pulled.Pulled(entry=entry, is_owned=is_owned))
    except OSError as error:
        raise disk_error(error, pulled.record_path(models_dir, entry.name), 0) from None
    return is_owned


async def _fetch_index(entry: Entry, stores: list[BlobStore], context: Context) -> tuple[bytes, Index]:
    """The index from the first store that gives it: its bytes and contents. Raises the last store's error.

    All are asked once before one is asked again: a store that does not answer in time delays no other one.
    """
    failure: StarlingError | None = None
    asked = list(stores)
    for failures in range(1, ATTEMPTS + 1):
        waits_s = []
        for store in list(asked):
            try:
                raw = await store.get(entry.index_key, 0, entry.index_bytes)
                return raw, await MODELS.run(_checked_index, raw, entry, store.address, context.cache)
            except DiskFailed:  # it is this machine's, not the store's
                raise
            except StorageUnavailable as error:
                failure = error
                waits_s.append(error.retry_after_s)
            except (NotFound, ConfigError) as error:
                failure = error
                asked.remove(store)
        if not asked or failures == ATTEMPTS:
            break
        await context.sleep(delay_s(failures, min(waits_s), context.jitter()))
    raise failure or ConfigError(f"{entry.name!r} has no source; set fleet.blobs", "fleet.blobs")


def _checked_index(raw: bytes, entry: Entry, where: str, cache: ModelCache) -> Index:
    """The index, if it is the one that the entry names. Raises `ConfigError`, `ResourceError`, `DiskFailed`."""
    if hashlib.sha256(raw).hexdigest() != entry.index_sha256:
        raise ConfigError(f"{where}/{entry.index_key} does not have the SHA-256 in its name; publish the model again")
    path = cache.part_path(entry.digest).with_name(f"{entry.digest}.idx.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        index = load_index(path)
    except CheckpointError as error:
        raise ConfigError(f"{where}/{entry.index_key}: {error}; publish the model again") from None
    except OSError as error:
        raise disk_error(error, path, len(raw)) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    named = (entry.digest, entry.weights_checksum, entry.weights_bytes)
    if (index.digest, index.pieces_digest, index.bin_bytes) != named:
        raise ConfigError(f"{where}/{entry.index_key} is of another model than its entry; publish the model again")
    return index


@contextlib.asynccontextmanager
async def locked(models_dir: Path, digest: str, sleep: Sleep) -> AsyncIterator[None]:
    """Hold the lock of a download. Another process that downloads the same file is waited for."""
    path = lock_path(models_dir, digest)
    held: list[int] = []  # the descriptor; also of a caller that is cancelled while it is opened
    try:
        while not await MODELS.uninterrupted(_take, path, held):
            await sleep(LOCK_POLL_S)
        yield
    finally:
        for fd in held:
            await MODELS.uninterrupted(locks.release, fd, path)


def _take(path: Path, held: list[int]) -> bool:
    """Whether the lock was free; then its descriptor is added to `held`."""
    while True:
        fd = locks.open_file(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if locks.holds(fd, path):
                held.append(fd)
                return True
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
