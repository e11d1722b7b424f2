"""Signed URLs of Azure (Azurite): what a stolen one can do, and its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from pipeline.blobs.cloud import CloudStore
from tests.fleet.peers import Bucket
from tests.fleet.stolen_url import asked, wait_for_end

KEY, OTHER = "models/a/one.bin", "models/a/two.bin"


@pytest.fixture
async def stolen(container: Bucket, tmp_path: Path) -> tuple[CloudStore, str]:
    """A store with two blobs, and a signed URL of the first."""
    async with container.open(tmp_path.name) as store:
        await store.put(KEY, b"first")
        await store.put(OTHER, b"second")
        return store, (await store.sign([KEY], 60))[KEY]


def changed(url: str, **fields: str) -> str:
    """The URL with other values. The library gives the fields in any order."""
    parts = urlsplit(url)
    return parts._replace(query=urlencode({**dict(parse_qsl(parts.query)), **fields})).geturl()


async def test_a_stolen_url_reads_one_blob_and_does_nothing_else(stolen: tuple[CloudStore, str]) -> None:
    store, url = stolen
    assert asked("GET", url) == (200, b"first")
    assert asked("GET", url, Range="bytes=1-2") == (206, b"ir")
    assert asked("GET", changed(url)) == (200, b"first")  # only what follows is wrong
    parts = urlsplit(url)
    folder = f"{parts.scheme}://{parts.netloc}" + "/".join(parts.path.split("/")[:3])
    thefts = [
        ("GET", url.replace(KEY, OTHER), None),
        ("GET", changed(url, sp="rwdl"), None),
        ("GET", changed(url, se="3026-01-01T00:00:00Z"), None),
        ("GET", f"{folder}?restype=container&comp=list&{parts.query}", None),
        ("DELETE", url, None),
        ("PUT", url, b"evil"),
        ("PUT", url.replace(KEY, "models/a/three.bin"), b"evil"),
    ]
    for method, target, body in thefts:
        assert (method, target) != ("GET", url)
        status, answer = asked(method, target, body, **({"x-ms-blob-type": "BlockBlob"} if body else {}))
        assert status == 403, (method, target, answer)
        assert b"first" not in answer and b"second" not in answer
    assert {blob.key: blob.nbytes for blob in await store.scan("models")} == {KEY: 5, OTHER: 6}


async def test_an_expired_url_reads_nothing(stolen: tuple[CloudStore, str]) -> None:
    store, _ = stolen
    url = (await store.sign([KEY], 1))[KEY]
    await asyncio.to_thread(wait_for_end, url)
    status, answer = asked("GET", url)
    assert status == 403 and b"first" not in answer
