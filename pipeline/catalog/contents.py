"""What the catalog contains: all entries, one of them, and its removal.

The manifests are the catalog.  `catalog.json` repeats them for stores that cannot list (a plain web server): each
writer of the catalog replaces it and then compares, so that of two writers at once the last one writes what both did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from pipeline.blobs.interface import BlobStore
from pipeline.blobs.retry import retried
from pipeline.catalog.entry import (
    FOLDER,
    LISTING,
    MAX_MANIFEST_BYTES,
    Entry,
    checked,
    decode,
    manifest_key,
)
from pipeline.errors import ConfigError, Conflict, ModelNotFound, NotFound, StarlingError, StorageUnavailable
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.catalog")

MAX_ENTRIES = 10_000
MAX_LISTING_BYTES = MAX_ENTRIES * 4096
READS_AT_ONCE = 16
ROUNDS = 8  # of writing the listing while other publishers change it

T = TypeVar("T")


async def entries(store: BlobStore) -> list[Entry]:
    """All entries, sorted by name. A manifest that cannot be used is logged and left out. Raises `StarlingError`."""
    if not store.can_list:
        return await _listed(store)
    found = await manifests(store, FOLDER, decode, lambda entry: manifest_key(entry.name))
    return sorted(found, key=lambda entry: entry.name)


async def manifests(
    store: BlobStore, folder: str, decode_one: Callable[[bytes, str], T], key_of: Callable[[T], str]
) -> list[T]:
    """The manifests of a folder. One that cannot be used is logged and left out. Raises `StarlingError`."""
    keys = [blob.key for blob in await retried(lambda: store.scan(folder)) if blob.key.endswith(".json")]
    if len(keys) > MAX_ENTRIES:
        raise ConfigError(f"{store.address}/{folder} has {len(keys):,} entries, expected at most {MAX_ENTRIES:,}")
    limit = asyncio.Semaphore(READS_AT_ONCE)

    async def one(key: str) -> T | None:
        async with limit:
            try:
                raw = await retried(lambda: store.read(key, MAX_MANIFEST_BYTES))
                found = decode_one(raw, f"{store.address}/{key}")
            except NotFound:  # removed since it was listed
                return None
            except ConfigError as error:
                log.warning("an entry of the catalog is left out", extra={"reason": str(error)})
                return None
            return found if key_of(found) == key else None

    found = await asyncio.gather(*(one(key) for key in keys))
    return [entry for entry in found if entry is not None]


async def manifest(store: BlobStore, key: str, read: Callable[[bytes, str], T]) -> T:
    """What `read(bytes, where)` makes of a manifest. Raises `NotFound`, `ConfigError`, and other `StarlingError`."""
    return read(await retried(lambda: store.read(key, MAX_MANIFEST_BYTES)), f"{store.address}/{key}")


async def current(store: BlobStore, key: str, read: Callable[[bytes, str], T], replace: bool) -> T | None:
    """The entry that has the name; None without one. A damaged one raises `ConfigError`, or with `replace` is none."""
    try:
        return await manifest(store, key, read)
    except NotFound:
        return None
    except ConfigError:
        if replace:
            return None
        raise


async def put_once(store: BlobStore, key: str, data: bytes) -> None:
    """Place a blob that is named by its contents: one that exists with this size has them."""
    try:
        await store.put(key, data)
    except Conflict:
        if await store.size(key) != len(data):  # what another program has put there
            await store.put(key, data, replace=True)


async def find(store: BlobStore, name: str) -> Entry:
    """The entry of a name. Raises `ModelNotFound` with the names that exist, and other `StarlingError`."""
    try:
        return await manifest(store, manifest_key(name), decode)
    except NotFound:
        try:
            known = ", ".join(entry.name for entry in await entries(store)) or "none"
        except StarlingError:
            known = "unknown"
        raise ModelNotFound(
            f"no model {name!r} is published at {store.address}; published models: {known[:500]}", "name"
        ) from None


async def remove(store: BlobStore, name: str) -> tuple[Entry, int]:
    """Remove an entry, then the blobs that no other entry names; the entry, and the bytes removed.

    Raises `ModelNotFound`, `StarlingError`.  Interrupted, it can be repeated: blobs go after the last entry.
    """
    entry = await find(store, name)
    await retried(lambda: store.delete(manifest_key(name)))
    await write_listing(store)
    kept = {key for other in await entries(store) if other.digest == entry.digest for key in other.blobs()}
    freed = 0
    for blob in await retried(lambda: store.scan(entry.folder)):
        if blob.key not in kept:
            await retried(lambda key=blob.key: store.delete(key))  # type: ignore[misc]
            freed += blob.nbytes
    return entry, freed


async def write_listing(store: BlobStore) -> None:
    """Bring `catalog.json` in line with the manifests. Raises `StarlingError`."""
    await repeat_in(store, LISTING, lambda: entries(store))


async def repeat_in(store: BlobStore, listing: str, read: Callable[[], Awaitable[list[Any]]]) -> None:
    """Write what `read` finds into a listing, until it finds that. Raises `StarlingError`."""
    written = None
    for _ in range(ROUNDS):
        current = await read()
        if current == written:
            return
        data = msgspec.json.encode(current)
        await retried(lambda data=data: store.put(listing, data, replace=True))  # type: ignore[misc]
        written = current
    log.warning("the listing of the catalog may lack the last change: other publishers write it all the time")


async def _listed(store: BlobStore) -> list[Entry]:
    where = f"{store.address}/{LISTING}"
    try:
        raw = await retried(lambda: store.read(LISTING, MAX_LISTING_BYTES))
        found = msgspec.json.decode(raw, type=list[Entry])
    except NotFound:
        raise ConfigError(f"{where} does not exist: nothing has been published there; check fleet.blobs") from None
    except DECODE_ERRORS as error:
        raise StorageUnavailable(f"{where} is not a listing ({error}); it may be changing, try again") from None
    return sorted((checked(entry, where) for entry in found), key=lambda entry: entry.name)
