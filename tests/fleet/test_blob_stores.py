"""One suite for all blob stores: a folder, a web server over it, and S3 and Azure where servers are installed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pipeline.blobs.folder import ABANDONED_S, INCOMING, FolderStore
from pipeline.blobs.http import HttpStore
from pipeline.blobs.interface import BlobStore, check_key
from pipeline.blobs.ranged_get import retry_after_s
from pipeline.errors import ConfigError, Conflict, InternalError, NotFound, ResourceError, StorageUnavailable
from tests.fleet.range_server import Handler, RangeServer, served

CONTENT = bytes(range(256)) * 40


class Place:
    """A store to write to, and one to read the same contents from; they differ for HTTP."""

    def __init__(self, writer: BlobStore, reader: BlobStore) -> None:
        self.writer, self.reader = writer, reader


@pytest.fixture(params=["folder", "http", "s3", "azure"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param in ("s3", "azure"):
        bucket = request.getfixturevalue("bucket" if request.param == "s3" else "container")
        async with bucket.open(tmp_path.name) as store:
            yield Place(store, store)
        return
    async with FolderStore(tmp_path / "blobs") as folder:
        if request.param == "folder":
            yield Place(folder, folder)
            return
        with served(tmp_path / "blobs") as server:
            async with HttpStore(server.url) as reader:
                yield Place(folder, reader)


# ------------------------------------------------------------------ every store


async def test_ranges_are_exact(place: Place) -> None:
    await place.writer.put("models/a/one.bin", CONTENT)
    assert await place.reader.size("models/a/one.bin") == len(CONTENT)
    for offset, nbytes in ((0, 1), (0, len(CONTENT)), (len(CONTENT) - 1, 1), (255, 513)):
        assert await place.reader.get("models/a/one.bin", offset, nbytes) == CONTENT[offset : offset + nbytes]
    assert await place.reader.read("models/a/one.bin", len(CONTENT)) == CONTENT


async def test_a_range_beyond_the_end_is_an_error_not_fewer_bytes(place: Place) -> None:
    await place.writer.put("one.bin", CONTENT)
    for offset in (1, len(CONTENT), len(CONTENT) + 5):
        with pytest.raises(StorageUnavailable):
            await place.reader.get("one.bin", offset, len(CONTENT))


async def test_a_missing_blob_is_not_found(place: Place) -> None:
    await place.writer.put("one.bin", CONTENT)
    with pytest.raises(NotFound):
        await place.reader.size("two.bin")
    with pytest.raises(NotFound):
        await place.reader.get("models/two.bin", 0, 1)


async def test_a_blob_is_replaced_only_when_asked(place: Place) -> None:
    await place.writer.put("catalog/one.json", b"first")
    with pytest.raises(Conflict):
        await place.writer.put("catalog/one.json", b"second")
    assert await place.reader.read("catalog/one.json", 100) == b"first"
    await place.writer.put("catalog/one.json", b"third", replace=True)
    assert await place.reader.read("catalog/one.json", 100) == b"third"


async def test_of_many_writers_one_wins(place: Place) -> None:
    values = [bytes([number]) * 1000 for number in range(8)]
    results = await asyncio.gather(*(place.writer.put("one.bin", one) for one in values), return_exceptions=True)
    assert [type(one) for one in results].count(Conflict) == 7
    assert await place.reader.read("one.bin", 1000) == values[results.index(None)]


async def test_a_blob_larger_than_expected_is_not_read(place: Place) -> None:
    await place.writer.put("one.bin", CONTENT)
    with pytest.raises(StorageUnavailable, match="expected at most 100"):
        await place.reader.read("one.bin", 100)


async def test_listing_and_deletion(place: Place) -> None:
    if not place.reader.can_list:
        with pytest.raises(ConfigError, match="cannot be listed"):
            await place.reader.scan("models")
        with pytest.raises(ConfigError, match="read-only"):
            await place.reader.put("a", b"1")
        return
    keys = ["catalog/a.json", "models/a/1.bin", "models/a/2.idx", "models/ab/1.bin"]
    for number, key in enumerate(keys):
        await place.writer.put(key, b"x" * (number + 1))
    assert [blob[:2] for blob in await place.reader.scan("models")] == [(keys[1], 2), (keys[2], 3), (keys[3], 4)]
    below = await place.reader.scan("models/a")  # a folder, not a prefix
    assert [blob[:2] for blob in below] == [(keys[1], 2), (keys[2], 3)]
    assert all(abs(time.time() - blob.modified) < 3600 for blob in below)
    assert await place.reader.scan("nothing") == []
    await place.writer.delete(keys[1])
    await place.writer.delete(keys[1])
    assert [blob.key for blob in await place.reader.scan("models/a")] == [keys[2]]


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.b", "a b", "a\n", "x" * 513])
def test_a_key_never_leaves_the_store(key: str) -> None:
    with pytest.raises(InternalError):
        check_key(key)


# ------------------------------------------------------------------ a folder


async def test_a_killed_writer_leaves_nothing_visible_and_is_cleaned_up(tmp_path: Path) -> None:
    incoming = tmp_path / INCOMING
    incoming.mkdir()
    (incoming / "abandoned").write_bytes(b"half")
    (incoming / "young").write_bytes(b"half")
    os.utime(incoming / "abandoned", (1000, 1000))
    os.utime(incoming / "young", (1000 + ABANDONED_S, 1000 + ABANDONED_S))
    store = FolderStore(tmp_path, clock=lambda: 1000 + ABANDONED_S + 1)
    assert await store.scan("models") == []
    await store.put("models/a.bin", b"whole")
    assert [path.name for path in incoming.iterdir()] == ["young"]
    assert [blob.key for blob in await store.scan("models")] == ["models/a.bin"]


@pytest.mark.parametrize(("is_private", "mode"), [(False, 0o755), (True, 0o700)])
async def test_new_directories_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_private: bool, mode: int
) -> None:
    """The parent of each is synchronized after it was made; else a power cut would lose it with the blob."""
    synced: dict[Path, list[str]] = {}  # what was in a directory when it was synchronized last
    sync = os.fsync

    def record(fd: int) -> None:
        sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            synced[path] = sorted(os.listdir(path))

    monkeypatch.setattr(os, "fsync", record)
    before = os.umask(0o022)
    try:
        store = FolderStore(tmp_path / "up" / "blobs", is_private=is_private)
        await store.put("models/a/one.bin", CONTENT)
    finally:
        os.umask(before)
    up, root = tmp_path / "up", tmp_path / "up" / "blobs"
    models = root / "models"
    assert synced == {
        tmp_path: ["up"],
        up: ["blobs"],
        root: [INCOMING, "models"],
        models: ["a"],
        models / "a": ["one.bin"],
    }
    assert up.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (root, root / INCOMING, models, models / "a")} == {mode}
    synced.clear()
    await store.put("models/a/two.bin", CONTENT)
    assert synced == {models / "a": ["one.bin", "two.bin"]}


async def test_a_blob_waits_until_the_directory_of_another_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are put at once, and the first one has created their directory."""
    root = tmp_path / "blobs"
    store = FolderStore(root)
    await store.put("first.bin", CONTENT)
    is_syncing, may_sync, sync = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(root):
            is_syncing.set()
            may_sync.wait(60.0)
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    first = asyncio.ensure_future(store.put("models/one.bin", CONTENT))
    await asyncio.to_thread(is_syncing.wait, 60.0)
    second = asyncio.ensure_future(store.put("models/two.bin", CONTENT))
    done, _ = await asyncio.wait([second], timeout=0.2)
    may_sync.set()
    await asyncio.gather(first, second)
    assert not done


async def test_a_full_disk_leaves_no_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(fd: int, data: bytes, at: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pipeline.blobs.folder.write_all", full)
    store = FolderStore(tmp_path)
    with pytest.raises(ResourceError, match="No space left"):
        await store.put("a.bin", b"x")
    assert not (tmp_path / "a.bin").exists()
    assert list((tmp_path / INCOMING).iterdir()) == []


async def test_a_folder_that_is_a_file_is_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="check fleet.blobs"):
        await FolderStore(tmp_path / "file").put("a.bin", b"x")


# ------------------------------------------------------------------ a web server that misbehaves


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with served(tmp_path) as running:
        yield running


async def error_of(server: RangeServer, nbytes: int = 100) -> Exception:
    async with HttpStore(server.url, clock=lambda: 0.0) as store:
        with pytest.raises((StorageUnavailable, ConfigError, NotFound)) as caught:
            await store.get("a.bin", 10, nbytes)
    return caught.value


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_busy_server_is_retried_when_it_says(server: RangeServer, status: int) -> None:
    server.fault = lambda handler, body: handler.refuse(status, Retry_After="7") or True
    error = await error_of(server)
    assert isinstance(error, StorageUnavailable)
    assert error.retry_after_s == 7.0


@pytest.mark.parametrize("status", [400, 401, 403])
async def test_a_refusal_is_not_retried(server: RangeServer, status: int) -> None:
    server.fault = lambda handler, body: handler.refuse(status) or True
    assert isinstance(await error_of(server), ConfigError)


async def test_a_server_without_ranges_is_refused_before_the_file_is_read(server: RangeServer) -> None:
    def whole(handler: Handler, body: bytes) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        return True

    server.fault = whole
    assert "does not answer ranges" in str(await error_of(server))


def _wrong_range(handler: Handler, body: bytes) -> bool:
    handler.send_range(11, len(CONTENT), body)
    return True


def _too_short(handler: Handler, body: bytes) -> bool:
    handler.send_range(10, len(CONTENT), body, length=len(body))
    return True


def _lying_length(handler: Handler, body: bytes) -> bool:
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes 10-109/{len(CONTENT)}")
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(body[:50])
    handler.close_connection = True
    return True


def _chunks_without_end(handler: Handler, body: bytes) -> bool:
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes 10-109/{len(CONTENT)}")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for _ in range(3):
        handler.wfile.write(b"64\r\n" + body[:100] + b"\r\n")
    handler.wfile.write(b"0\r\n\r\n")
    return True


def _compressed(handler: Handler, body: bytes) -> bool:
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes 10-109/{len(CONTENT)}")
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(body)
    return True


@pytest.mark.parametrize("fault", [_wrong_range, _lying_length, _chunks_without_end, _compressed])
async def test_no_wrong_answer_becomes_bytes(server: RangeServer, fault: object) -> None:
    server.fault = fault  # type: ignore[assignment]
    await error_of(server)


async def test_a_server_that_is_down_is_unavailable(server: RangeServer) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    async with HttpStore(url) as store:
        with pytest.raises(StorageUnavailable):
            await store.size("a.bin")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("", 0.0),
        ("120", 120.0),
        ("-1", 0.0),
        ("soon", 0.0),
        ("9" * 40, 999999999.0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("Thu, 01 Jan 99999999999 00:02:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 +99999999999999", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str, seconds: float) -> None:
    assert retry_after_s(header, 100.0) == seconds
