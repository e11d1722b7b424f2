"""An adapter is published as a whole or not at all, once, and only with the bytes that were prepared."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import msgspec
import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.blobs.http import HttpStore
from pipeline.blobs.interface import Data
from pipeline.catalog import adapters, contents
from pipeline.catalog.adapter_entry import LISTING, AdapterEntry, decode, manifest_key
from pipeline.catalog.entry import Entry, Source, encode
from pipeline.errors import ConfigError, Conflict, ModelNotFound, ResourceError
from tests.fleet.range_server import served

RAW = b"STARLORA" + bytes(range(256)) * 8
BASE = Entry(
    name="org/tiny",
    digest="d" * 64,
    source=Source(file="m.gguf", bytes=1),
    index_sha256="b" * 64,
    index_bytes=10,
    weights_bytes=100,
    weights_checksum="c" * 32,
)


def entry(
    name: str = "first", raw: bytes = RAW, base: str = "org/tiny", base_digest: str = BASE.digest
) -> AdapterEntry:
    return AdapterEntry(
        base=base,
        adapter=name,
        base_digest=base_digest,
        digest=hashlib.sha256(raw).hexdigest(),
        bytes=len(raw),
        rank=4,
        source="first.gguf",
    )


async def test_a_published_adapter_is_listed_and_again_sends_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    first = await adapters.publish(store, entry(), RAW)
    assert first.sent == len(RAW)
    assert await adapters.entries(store) == [entry()]
    assert await adapters.find(store, "org/tiny:first") == entry()
    assert store.path(entry().key).read_bytes() == RAW
    assert (await adapters.publish(store, entry(), RAW)).sent == 0
    # Another name shares the file.
    assert (await adapters.publish(store, entry("again"), RAW)).sent == 0
    assert await contents.entries(store) == [], "models are listed apart"


async def test_a_store_that_cannot_list_has_them_all(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        async with HttpStore(server.url) as web:
            assert await adapters.entries(web) == []
            await adapters.publish(FolderStore(tmp_path), entry(), RAW)
            assert await adapters.entries(web) == [entry()]


@pytest.mark.parametrize("after", [0, 1])
async def test_an_interrupted_publication_is_invisible(tmp_path: Path, after: int) -> None:
    class Ending(FolderStore):
        begun = 0

        async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
            self.begun += 1
            if self.begun > after:
                raise ResourceError("the store is full")
            await super().put(key, data, replace=replace)

    with pytest.raises(ResourceError):
        await adapters.publish(Ending(tmp_path), entry(), RAW)
    store = FolderStore(tmp_path)
    assert await adapters.entries(store) == []
    assert (await adapters.publish(store, entry(), RAW)).sent == (len(RAW) if after == 0 else 0)
    assert await adapters.entries(store) == [entry()]


async def test_a_name_keeps_its_adapter(tmp_path: Path) -> None:
    store, other = FolderStore(tmp_path), RAW + b"x"
    await adapters.publish(store, entry(), RAW)
    with pytest.raises(Conflict, match="with other matrices"):
        await adapters.publish(store, entry(raw=other), other)
    with pytest.raises(Conflict, match="for another version of its model"):
        await adapters.publish(store, entry(base_digest="e" * 64), RAW)
    assert await adapters.entries(store) == [entry()]
    await adapters.publish(store, entry(raw=other), other, replace=True)
    assert await adapters.entries(store) == [entry(raw=other)]


async def test_of_two_publishers_at_once_one_gets_the_error(tmp_path: Path) -> None:
    store, other = FolderStore(tmp_path), RAW + b"x"
    done = await asyncio.gather(
        adapters.publish(store, entry(), RAW),
        adapters.publish(store, entry(raw=other), other),
        return_exceptions=True,
    )
    assert sorted(type(one).__name__ for one in done) == ["Conflict", "PublishedAdapter"]
    (found,) = await adapters.entries(store)
    assert store.path(found.key).read_bytes() == (RAW if found == entry() else other)


async def test_other_bytes_than_the_digest_names_are_not_published(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is damaged"):
        await adapters.publish(FolderStore(tmp_path), entry(), RAW[:-1] + b"x")
    assert await adapters.entries(FolderStore(tmp_path)) == []


async def test_a_cut_off_file_is_sent_again(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    await adapters.publish(store, entry(), RAW)
    await store.put(entry().key, RAW[:100], replace=True)
    assert (await adapters.publish(store, entry(), RAW)).sent == len(RAW)
    assert store.path(entry().key).read_bytes() == RAW


async def test_a_file_goes_with_its_last_name(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for name in ("first", "again"):
        await adapters.publish(store, entry(name), RAW)
    assert await adapters.remove(store, "org/tiny:first") == 0
    assert store.path(entry().key).exists()
    assert await adapters.remove_all_of(store, "org/tiny") == len(RAW)
    assert not store.path(entry().key).exists() and await adapters.entries(store) == []
    assert msgspec.json.decode(store.path(LISTING).read_bytes()) == []
    with pytest.raises(ModelNotFound, match="has no adapter 'first'; it has: none"):
        await adapters.remove(store, "org/tiny:first")


def test_adapters_of_another_version_of_their_model_are_not_usable() -> None:
    mine, old, orphan = entry(), entry("old", base_digest="e" * 64), entry("orphan", base="gone")
    assert adapters.usable([mine, old, orphan], [BASE]) == [(mine, BASE)]


@pytest.mark.parametrize(
    "change", [{"base": "../x"}, {"adapter": "a/b"}, {"adapter": ""}, {"format": 2}, {"bytes": 0}, {"rank": 513}]
)
def test_a_manifest_that_cannot_be_used_is_refused(change: dict[str, object]) -> None:
    raw = msgspec.json.encode({**msgspec.to_builtins(entry()), **change})
    with pytest.raises(ConfigError):
        decode(raw, "here")
    assert decode(encode(entry()), "here") == entry()
    assert manifest_key("org/tiny:first") == "adapters/org--tiny/first.json"
