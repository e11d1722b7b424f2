"""The published LoRA adapters: all of them, one, publication and removal.

The order of a publication makes a half-published adapter invisible: its file, then the manifest, then the listing.
Repeated, it sends nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pipeline.blobs.interface import BlobStore
from pipeline.blobs.retry import retried
from pipeline.catalog import contents
from pipeline.catalog.adapter_entry import FOLDER, LISTING, AdapterEntry, decode, manifest_key
from pipeline.catalog.entry import Entry, encode
from pipeline.errors import ConfigError, Conflict, ModelNotFound, NotFound, StarlingError, StorageUnavailable
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.catalog")


class PublishedAdapter(NamedTuple):
    """What a publication did."""

    entry: AdapterEntry
    sent: int  # bytes of its file; 0: the store had it


async def entries(store: BlobStore) -> list[AdapterEntry]:
    """All adapters, sorted by name. A manifest that cannot be used is logged and left out. Raises `StarlingError`."""
    found = (
        await contents.manifests(store, FOLDER, decode, lambda entry: manifest_key(entry.name))
        if store.can_list
        else await _listed(store)
    )
    return sorted(found, key=lambda entry: (entry.base, entry.adapter))


def usable(adapters: Iterable[AdapterEntry], models: Iterable[Entry]) -> list[tuple[AdapterEntry, Entry]]:
    """The adapters whose model is published in the version that they were made for, with its entry."""
    by_name = {model.name: model for model in models}
    return [(one, model) for one in adapters if (model := by_name.get(one.base)) and model.digest == one.base_digest]


async def find(store: BlobStore, name: str) -> AdapterEntry:
    """The entry of BASE:ADAPTER. Raises `ModelNotFound` with the names that exist, and other `StarlingError`."""
    try:
        return await contents.manifest(store, manifest_key(name), decode)
    except NotFound:
        base, _, adapter = name.partition(":")
        try:
            known = [entry.name for entry in await entries(store) if entry.base == base]
        except StarlingError:
            known = []
        raise unknown_adapter(base, adapter, known) from None


def unknown_adapter(base: str, adapter: str, known: Iterable[str]) -> ModelNotFound:
    """The error of a request for an adapter that a model does not have. `known`: names of those that it has."""
    listed = ", ".join(known) or "none"
    return ModelNotFound(f"model {base!r} has no adapter {adapter[:100]!r}; it has: {listed[:2000]}", "model")


async def publish(store: BlobStore, entry: AdapterEntry, raw: bytes, *, replace: bool = False) -> PublishedAdapter:
    """Publish an adapter, whose file has the bytes `raw`. `replace`: whether its name may change to another one.

    Raises `ConfigError`, `Conflict` (the name has another adapter), `ResourceError` (the store is full),
    `StorageUnavailable`.
    """
    if await asyncio.to_thread(lambda: hashlib.sha256(raw).hexdigest()) != entry.digest or len(raw) != entry.bytes:
        raise ConfigError(f"the file of adapter {entry.name!r} is damaged: prepare it again")
    current = await contents.current(store, manifest_key(entry.name), decode, replace)
    if current is not None and not current.same_adapter(entry) and not replace:
        raise _taken(entry, current)
    sent = 0
    if await _size(store, entry.key) != len(raw):
        await retried(lambda: contents.put_once(store, entry.key, raw))
        sent = len(raw)
    before = current
    if current is None or not current.same_adapter(entry):
        try:
            # Without `replace` one of two publishers gets Conflict, whatever both have read before.
            await retried(lambda: store.put(manifest_key(entry.name), encode(entry), replace=replace))
        except Conflict:
            current = await contents.current(store, manifest_key(entry.name), decode, replace)
            if current is None or not current.same_adapter(entry):
                raise (_taken(entry, current) if current else Conflict(f"{entry.name!r} is being removed")) from None
        else:
            current = entry
    await _write_listing(store)
    if before is not None and before.digest != current.digest:
        await _remove_unnamed(store, before)
    return PublishedAdapter(current, sent)


async def remove(store: BlobStore, name: str) -> int:
    """Remove an adapter; the bytes freed: none if another entry uses its file. Raises `ModelNotFound`."""
    return await _remove(store, await find(store, name))


async def remove_all_of(store: BlobStore, base: str) -> int:
    """Remove the adapters of a model; the bytes freed. Interrupted, it can be repeated. Raises `StarlingError`."""
    return sum([await _remove(store, entry) for entry in await entries(store) if entry.base == base])


async def _remove(store: BlobStore, entry: AdapterEntry) -> int:
    await retried(lambda: store.delete(manifest_key(entry.name)))
    await _write_listing(store)
    return await _remove_unnamed(store, entry)


async def _remove_unnamed(store: BlobStore, entry: AdapterEntry) -> int:
    """Remove the file of an entry that has left unless another entry names it; the bytes freed."""
    if any(other.digest == entry.digest for other in await entries(store)):
        return 0
    await retried(lambda: store.delete(entry.key))
    return entry.bytes


async def _write_listing(store: BlobStore) -> None:
    await contents.repeat_in(store, LISTING, lambda: entries(store))


async def _listed(store: BlobStore) -> list[AdapterEntry]:
    where = f"{store.address}/{LISTING}"
    try:
        raw = await retried(lambda: store.read(LISTING, contents.MAX_LISTING_BYTES))
        listed = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except NotFound:  # none was ever published
        return []
    except DECODE_ERRORS as error:
        raise StorageUnavailable(f"{where} is not a listing ({error}); it may be changing, try again") from None
    found = []
    for one in listed:
        try:
            found.append(decode(bytes(one), where))
        except ConfigError as error:  # of another release; the others are used
            log.warning("an adapter of the catalog is left out", extra={"reason": error.message})
    return found


async def _size(store: BlobStore, key: str) -> int:
    """Bytes of a blob; -1 without one."""
    try:
        return await retried(lambda: store.size(key))
    except NotFound:
        return -1


def _taken(entry: AdapterEntry, current: AdapterEntry) -> Conflict:
    what = "for another version of its model" if current.digest == entry.digest else "with other matrices"
    return Conflict(
        f"{entry.name!r} is published {what} ({current.source}, SHA-256 {current.digest[:16]}...; this one has "
        f"{entry.digest[:16]}...): choose another --name, or give --replace",
        "name",
    )
