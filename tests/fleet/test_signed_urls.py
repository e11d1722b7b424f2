"""An agent without credentials reads by URLs that are signed for it, gets new ones in time, and keeps them secret."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from yarl import URL

from pipeline.blobs.folder import FolderStore
from pipeline.blobs.http import HttpStore
from pipeline.blobs.interface import BlobStore
from pipeline.blobs.ranged_get import RangeReader
from pipeline.catalog.entry import Entry
from pipeline.config.load import resolve
from pipeline.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    NotFound,
    StarlingError,
    StorageUnavailable,
)
from pipeline.fleet.bodies import MAX_URLS, LoadModelRequest, SignedUrls
from stages.agent.downloads.model import _fetch_index, download_model
from stages.agent.downloads.signed_store import AHEAD, KEPT, SignedModels, SignedStore, entry_of
from stages.agent.models import Models
from stages.agent.state_file import Stored
from tests.fleet.coordination_stores import Clock
from tests.fleet.range_server import Handler
from tests.fleet.site import Site

SECRET = "sig=c2VjcmV0LXNpZ25hdHVyZQ%2B%2F"
MANY = 100  # parts


@pytest.fixture
def large(published: tuple[Path, Entry]) -> Entry:
    """An entry of so many parts that not all of them have a URL at once."""
    _, entry = published
    return msgspec.structs.replace(entry, weights_bytes=MANY * entry.part_bytes)


def urls_of(entry: Entry, base: str = "http://127.0.0.1:9", keys: list[str] | None = None) -> SignedUrls:
    given = [entry.index_key, *(entry.part_key(part) for part in range(min(entry.n_parts, MAX_URLS - 1)))]
    return SignedUrls(entry=entry, valid_s=100, urls={key: f"{base}/{key}?{SECRET}" for key in keys or given})


def test_urls_last_a_minute_at_least() -> None:
    """A shorter one could end before the agent has used it, or asked for the next one."""
    assert resolve({"fleet": {"orchestrator": {"url_valid_s": 60}}}, {}).fleet.orchestrator.url_valid_s == 60
    with pytest.raises(ConfigError, match="url_valid_s"):
        resolve({"fleet": {"orchestrator": {"url_valid_s": 59}}}, {})


# ------------------------------------------------------------------ which URLs are asked for


async def test_urls_are_asked_for_ahead_and_before_they_end(large: Entry, clock: Clock) -> None:
    store = SignedStore(large, RangeReader(), clock)
    ahead = tuple(large.part_key(part) for part in range(AHEAD))
    assert store.wanted() == ahead
    store.take(urls_of(large))
    assert store.wanted() == ()
    clock.now += 49
    assert store.wanted() == ()
    clock.now += 1  # of 100 s, the first half has passed
    assert store.wanted() == ahead
    store.take(urls_of(large))
    assert store.wanted() == ()


async def test_a_read_asks_for_its_own_url_first(large: Entry, clock: Clock) -> None:
    store = SignedStore(large, RangeReader(), clock, wait_s=60)
    reads = [asyncio.create_task(store.get(key, 0, 1)) for key in (large.part_key(90), large.index_key)]
    while len(store.wanted()) < AHEAD + 2:
        await asyncio.sleep(0)
    assert store.wanted()[:2] == (large.part_key(90), large.index_key)
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    assert large.index_key not in store.wanted()


async def test_the_urls_that_are_kept_are_bounded(large: Entry, clock: Clock) -> None:
    entry = msgspec.structs.replace(large, weights_bytes=(KEPT + 50) * large.part_bytes)
    store = SignedStore(entry, RangeReader(), clock)
    for part in range(entry.n_parts):
        store.take(urls_of(entry, keys=[entry.part_key(part)]))
    assert len(store._urls) == KEPT


async def test_urls_of_another_model_or_of_no_blob_are_dropped(large: Entry, clock: Clock) -> None:
    store = SignedStore(large, RangeReader(), clock)
    store.take(urls_of(msgspec.structs.replace(large, digest="0" * 64)))
    store.take(urls_of(large, keys=["catalog/tiny.json", large.part_key(0) + "x", large.folder + "/a.bin"]))
    assert len(store._urls) == 0
    with pytest.raises(InvalidRequest, match="expected 'other'"):
        entry_of(urls_of(large), "other")


def test_an_entry_has_its_own_keys_only(large: Entry) -> None:
    assert [large.part_of(large.part_key(part)) for part in (0, 7, MANY - 1)] == [0, 7, MANY - 1]
    assert all(large.has(key) for key in (large.index_key, large.part_key(3)))
    other = msgspec.structs.replace(large, weights_checksum="0" * 32)
    wrong = (large.part_key(MANY), other.part_key(0), large.folder, "", large.part_key(0) + "/", "catalog.json")
    assert not any(large.has(key) for key in wrong)
    assert large.part_of(large.part_key(0).replace("00000", "0000²")) is None


# ------------------------------------------------------------------ reads


async def test_a_read_without_a_url_ends(large: Entry, clock: Clock) -> None:
    store = SignedStore(large, RangeReader(), clock, wait_s=0.01)
    with pytest.raises(StorageUnavailable, match=r"no orchestrator has sent a signed URL within 0\.01 s"):
        await store.get(large.part_key(0), 0, 1)
    assert large.part_key(0) not in store._awaited


async def test_a_url_that_is_refused_is_replaced_in_the_middle_of_a_download(site: Site) -> None:
    """The store refuses every URL once it has been used for one piece, as if its time were over."""
    used: set[str] = set()

    def refuse_used(handler: Handler, body: bytes) -> bool:
        with site.server.lock:
            is_used = handler.path in used
            used.add(handler.path)
        if is_used:
            handler.refuse(403)
        return is_used

    site.server.fault = refuse_used
    signed = SignedModels([])
    signed.begin(SignedUrls(entry=site.entry, valid_s=100, urls={}))
    count = 0

    async def orchestrate() -> None:
        nonlocal count
        while True:
            for one in signed.wanted():
                count += 1
                base = {key: f"{site.server.url}/{key}?n={count}&{SECRET}" for key in one.keys}
                signed.take(SignedUrls(entry=site.entry, valid_s=100, urls=base))
            await asyncio.sleep(0.01)

    orchestrating = asyncio.create_task(orchestrate())
    context = site.context()._replace(limits=site.context().limits._replace(connections=1))
    try:
        stores = signed.stores_of(site.entry)
        arrival = await download_model(context, site.entry, stores, lambda phase, done, total: None)
    finally:
        orchestrating.cancel()
        await signed.close()
    assert site.is_right()
    assert arrival.report is not None
    assert arrival.report.by_source == {"the URLs that an orchestrator signs": (site.entry.weights_bytes, 0)}
    assert count > site.entry.n_parts  # each part has several pieces
    signed.end("tiny")
    assert signed.wanted() == () and signed.stores_of(site.entry) == []


async def test_mirrors_give_the_index_while_no_url_can_be_signed(site: Site) -> None:
    async with HttpStore(site.server.url) as mirror:
        signed = SignedModels([mirror])
        signed.begin(SignedUrls(entry=site.entry, valid_s=100, urls={}))
        stores = signed.stores_of(site.entry)
        fetching = asyncio.create_task(_fetch_index(site.entry, stores, site.context()))
        while not fetching.done():
            # The index is not waited for: an orchestrator that cannot sign brings no URL.
            assert site.entry.index_key not in signed.wanted()[0].keys
            await asyncio.sleep(0)
        raw, _ = fetching.result()
        assert len(raw) == site.entry.index_bytes
        await signed.close()


async def test_urls_that_are_always_refused_end_the_download_with_the_remedy(site: Site) -> None:
    site.server.fault = lambda handler, body: handler.refuse(403) or True
    store = SignedStore(site.entry, RangeReader())

    async def orchestrate() -> None:
        while True:
            store.take(urls_of(site.entry, site.server.url))
            await asyncio.sleep(0)

    orchestrating = asyncio.create_task(orchestrate())
    with pytest.raises(ConfigError, match="check the orchestrator's credentials, and its clock") as caught:
        await store.get(site.entry.part_key(0), 0, 1)
    orchestrating.cancel()
    await store._reader.close()
    assert "sig=" not in str(caught.value)


@pytest.mark.parametrize("is_signed", [True, False])
async def test_a_signed_url_is_sent_without_the_credentials_of_netrc(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_signed: bool
) -> None:
    """A store refuses a request with two signatures. A web server may need what `.netrc` has for it."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login git password other\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    received: list[str | None] = []
    site.server.fault = lambda handler, body: received.append(handler.headers["Authorization"])  # type: ignore[func-returns-value,assignment,return-value]
    if is_signed:
        signed = SignedModels([])
        signed.begin(urls_of(site.entry, site.server.url))
        (store,) = signed.stores_of(site.entry)
    else:
        store = HttpStore(site.server.url)
    await store.get(site.entry.index_key, 0, 1)
    await (signed.close() if is_signed else store.close())
    assert received == [None if is_signed else "Basic Z2l0Om90aGVy"]


# ------------------------------------------------------------------ a request without URLs


@pytest.mark.parametrize("blobs", ["folder", "web"])
async def test_a_store_that_needs_no_credentials_says_which_models_exist(
    site: Site, tmp_path: Path, blobs: str
) -> None:
    """As to an agent with credentials: its own store decides, and its mirrors do not."""
    address = str(site.root) if blobs == "folder" else site.server.url
    models = agent_models(tmp_path, address, [FolderStore(site.root) if blobs == "folder" else HttpStore(address)])
    with pytest.raises(ModelNotFound, match=r"no model 'nothing' is published at .*: tiny"):
        await models.place(LoadModelRequest(model_id="nothing"))
    site.server.fault = lambda handler, body: handler.refuse(403) or True
    if blobs == "web":
        with pytest.raises(ConfigError, match="answers 403; check fleet.blobs"):
            await models.place(LoadModelRequest(model_id="tiny"))
    await close(models)


async def test_mirrors_of_a_bucket_do_not_say_which_models_exist(tmp_path: Path) -> None:
    """They may lack some: without URLs an orchestrator has to be asked."""
    mirror = FolderStore(tmp_path / "mirror")
    models = agent_models(tmp_path, "s3://bucket/prefix", [mirror])
    with pytest.raises(ModelUnavailable, match=r"uses no credentials .* no signed URLs"):
        await models.place(LoadModelRequest(model_id="tiny"))
    await close(models)


def agent_models(folder: Path, blobs: str, stores: list[BlobStore]) -> Models:
    """The models of an agent with `fleet.agent.signed_urls`."""
    none: Any = None
    config = resolve({"fleet": {"blobs": blobs, "agent": {"signed_urls": True}}}, {})
    stored = Stored(agent_id="a", incarnation="b")
    signed = SignedModels([])
    return Models(config, folder, folder / "models", stored, stores, none, none, lambda: True, signed=signed)


async def close(models: Models) -> None:
    await models.stop()
    for store in models._stores:
        await store.close()


# ------------------------------------------------------------------ the query is a secret


def _redirected(handler: Handler, body: bytes) -> bool:
    """To another path, with another signature."""
    if "hop" not in handler.path:
        handler.refuse(302, Location=f"/hop?{SECRET}")
    return "hop" not in handler.path


def _round(handler: Handler, body: bytes) -> bool:
    handler.refuse(302, Location=f"{handler.path.partition('?')[0]}?{SECRET}")
    return True


def _no_http(handler: Handler, body: bytes) -> bool:
    handler.wfile.write(b"HTTP/9.9 " + handler.path.encode() + b"\r\n\r\n")
    handler.close_connection = True
    return True


def _wrong_range(handler: Handler, body: bytes) -> bool:
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {handler.path}")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    return True


def _reason(handler: Handler, body: bytes) -> bool:
    handler.send_response(500, handler.path)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


def _whole(handler: Handler, body: bytes) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 40))
    handler.end_headers()
    return True


def _cut(handler: Handler, body: bytes) -> bool:
    handler.send_response(206)
    handler.send_header("Content-Range", "bytes 10-109/1000")
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(body[:50])
    handler.close_connection = True
    return True


def _hangs_up(handler: Handler, body: bytes) -> bool:
    handler.close_connection = True
    return True


FAULTS = [_redirected, _round, _no_http, _wrong_range, _reason, _whole, _cut, _hangs_up]


@pytest.mark.parametrize("fault", [*FAULTS, *(400, 401, 403, 404, 416, 429, 503)])
async def test_no_error_contains_the_query_of_a_url(site: Site, fault: object) -> None:
    site.server.fault = fault if callable(fault) else lambda handler, body: handler.refuse(fault) or True  # type: ignore
    key = site.entry.part_key(0)
    for redirects in (0, 4):  # of signed URLs, and of web servers
        reader = RangeReader(redirects=redirects)
        with pytest.raises(StarlingError) as caught:
            await reader.get(URL(f"{site.server.url}/{key}?{SECRET}", encoded=True), 10, 100)
        await reader.close()
        assert key in caught.value.message or "/hop" in caught.value.message
        assert not any(part in repr(caught.value) for part in ("sig=", "c2VjcmV0", "?"))


async def test_a_server_that_is_down_is_named_without_the_query(site: Site) -> None:
    reader = RangeReader()
    with pytest.raises(StorageUnavailable, match="Cannot connect to host 127.0.0.1:9") as caught:
        await reader.get(URL(f"http://127.0.0.1:9/a.bin?{SECRET}", encoded=True), 0, 1)
    await reader.close()
    assert "sig=" not in caught.value.message
    async with HttpStore(site.server.url) as store:
        with pytest.raises(NotFound):
            await store.get("nothing.bin", 0, 1)


def test_bodies_show_no_url(large: Entry) -> None:
    signed = urls_of(large)
    assert "sig=" not in repr(LoadModelRequest(model_id="tiny", signed=signed))
    assert "sig=" in msgspec.json.encode(signed).decode()
