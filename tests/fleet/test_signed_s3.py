"""Signed URLs of a real S3 server: what a stolen one can do, what follows its end, an agent without credentials."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from click.testing import CliRunner

from pipeline.blobs.cloud import CloudStore
from pipeline.catalog.publish import publish
from pipeline.fleet import token as tokens
from pipeline.fleet.bodies import HeartbeatResponse, LoadedModel
from shm.checkpoint import PIECE_BYTES
from stages.agent.cache.eviction import Bounds
from stages.agent.cache.model_cache import ModelCache
from stages.agent.downloads.bandwidth import Bandwidth
from stages.agent.downloads.model import Context, download_model
from stages.agent.downloads.signed_store import SignedModels
from stages.orchestrator.signed_urls import UrlSigner
from starling.cli import cli
from tests.e2e.conftest import share_caches
from tests.fleet.agent_process import Agent, post
from tests.fleet.checkpoints import write_checkpoint
from tests.fleet.peers import Bucket
from tests.fleet.stolen_url import asked, wait_for_end
from tests.orchestrator.fleet import Fleet
from tools.tiny_gguf import SHAPES, write_model

KEY, OTHER = "models/a/one.bin", "models/a/two.bin"


@pytest.fixture
async def stolen(bucket: Bucket, tmp_path: Path) -> tuple[CloudStore, str]:
    """A store with two blobs, and a signed URL of the first."""
    async with bucket.open(tmp_path.name) as store:
        await store.put(KEY, b"first")
        await store.put(OTHER, b"second")
        return store, (await store.sign([KEY], 60))[KEY]


async def test_a_stolen_url_reads_one_blob(stolen: tuple[CloudStore, str]) -> None:
    _, url = stolen
    assert asked("GET", url) == (200, b"first")
    assert asked("GET", url, Range="bytes=1-2") == (206, b"ir")


@pytest.mark.parametrize("theft", [
    ("GET", KEY, OTHER),
    ("GET", KEY, KEY + ".bak"),
    ("PUT", "", ""),
    ("POST", "", ""),
    ("DELETE", "", ""),
    ("GET", "X-Amz-Expires=60", "X-Amz-Expires=604800"),
    ("GET", "X-Amz-Signature=", "X-Amz-Signature=0"),
    ("GET", f"/{KEY}?", "?list-type=2&"),
    ("GET", "/models", "/catalog"),
    ("PUT", KEY, "models/a/three.bin"),
])  # fmt: skip
async def test_a_stolen_url_does_nothing_else(stolen: tuple[CloudStore, str], theft: tuple[str, str, str]) -> None:
    store, url = stolen
    method, before, after = theft
    assert before in url
    status, answer = asked(method, url.replace(before, after), None if method == "GET" else b"evil")
    assert status in (400, 403, 405), answer
    assert b"first" not in answer and b"second" not in answer
    found = {blob.key: blob.nbytes for blob in await store.scan("models")}
    assert found == {KEY: 5, OTHER: 6}


async def test_a_stolen_url_lists_nothing(stolen: tuple[CloudStore, str]) -> None:
    _, url = stolen
    parts = urlsplit(url)
    bucket = "/" + parts.path.split("/")[1]
    for path in (bucket, bucket + "/", parts.path.removesuffix(KEY), "/"):
        for query in (parts.query, f"list-type=2&{parts.query}", f"{parts.query}&list-type=2&prefix=models"):
            status, answer = asked("GET", f"{parts.scheme}://{parts.netloc}{path}?{query}")
            assert status in (400, 403, 404), (path, answer)
            assert b"two.bin" not in answer


async def test_an_expired_url_reads_nothing(stolen: tuple[CloudStore, str]) -> None:
    store, _ = stolen
    url = (await store.sign([KEY], 1))[KEY]
    await asyncio.to_thread(wait_for_end, url)
    status, answer = asked("GET", url)
    assert status == 403 and b"first" not in answer
    assert asked("GET", (await store.sign([KEY], 60))[KEY]) == (200, b"first")


async def test_a_download_goes_on_when_its_urls_have_ended(bucket: Bucket, tmp_path: Path) -> None:
    index_path, _ = write_checkpoint(tmp_path / "prepared", 5 * PIECE_BYTES + 77)  # of two parts
    async with bucket.open(tmp_path.name) as store:
        done = await publish(store, index_path, "tiny", "tiny.gguf", 0, lambda phase, done, total: None)
        entry = done.entry
        signed, signer = SignedModels([]), UrlSigner(store, 60, lambda agent: None, time.monotonic)
        signer.set_entries([entry])
        signer.observe(details(signed))
        given = await signer.begin("one", "tiny")
        assert given is not None and set(given.urls) == set(entry.blobs())
        # The agent takes them for valid, because time has passed otherwise than it thinks.
        ended = await store.sign(list(given.urls), 1)
        await asyncio.to_thread(wait_for_end, ended[entry.part_key(1)])
        index = {entry.index_key: given.urls[entry.index_key]}
        signed.begin(msgspec.structs.replace(given, urls={**ended, **index}))
        heartbeats = asyncio.create_task(beat(signed, signer))
        cache = ModelCache(tmp_path / "models", Bounds(0, 0), lambda path: 1 << 60)
        context = Context(cache, Bandwidth(0, time.monotonic))
        try:
            arrival = await download_model(context, entry, signed.stores_of(entry), lambda phase, done, total: None)
        finally:
            heartbeats.cancel()
            await signed.close()
            await signer.close()
        assert arrival.report is not None and arrival.report.received == entry.weights_bytes
        published = index_path.with_suffix(".bin").read_bytes()
        assert arrival.index_path.with_suffix(".bin").read_bytes() == published


def details(signed: SignedModels) -> HeartbeatResponse:
    return HeartbeatResponse(
        agent_id="one",
        incarnation="1",
        state="LOADING_MODEL",
        takes_signed_urls=True,
        wanted_urls=signed.wanted(),
        loaded_models=(LoadedModel(model_id="tiny", model_state="DOWNLOADING", cache_level="REMOTE"),),
    )


async def beat(signed: SignedModels, signer: UrlSigner) -> None:
    """The heartbeats between an agent and an orchestrator, without end."""
    while True:
        for one in signer.take("one"):
            signed.take(one)
        signer.observe(details(signed))
        await asyncio.sleep(0.02)


# ------------------------------------------------------------------ processes


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="sg-") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_an_agent_without_credentials_loads_a_model(bucket: Bucket, short: Path, tmp_path: Path) -> None:
    address = {"blobs": bucket.address(tmp_path.name), "blobs_endpoint": bucket.endpoint, "blobs_region": "us-east-1"}
    gguf = tmp_path / "tiny.gguf"
    write_model(gguf, SHAPES["small"], "Q8_0", seed=1)
    env = {"STARLING_HOME": str(tmp_path / "publisher")}
    env |= {f"STARLING_FLEET__{name.upper()}": value for name, value in address.items()}
    result = CliRunner().invoke(cli, ["publish", str(gguf), "--name", "tiny"], env=env)
    assert result.exit_code == 0, result.output

    front, host = short / "o", short / "a"
    fleet = Fleet(front, {"fleet": {**address, "orchestrator": {"poll_ms": 50, "url_valid_s": 60}}})
    host.mkdir()
    share_caches(host)
    (host / "fleet-token").write_text(fleet.secret)
    (host / "fleet-token").chmod(0o600)
    settings: dict[str, Any] = {
        "cache": {"max_size_mb": 32},
        "fleet": {
            **address,
            "store": f"sqlite:{front / 'fleet.db'}",
            "agent": {"lease_ms": 600_000, "signed_urls": True},
        },
    }
    agent = Agent(host, settings)
    for name in [name for name in agent.environment if name.startswith("AWS_")]:
        del agent.environment[name]
    try:
        agent.start()
        agent.wait_ready()
        assert agent.process is not None
        given = Path(f"/proc/{agent.process.pid}/environ").read_bytes()
        assert b"AWS_" not in given and b"testtest" not in given
        fleet.wait(lambda state: any(one["health"] == "READY" for one in state["agents"]))
        # Not told by an orchestrator, it has no way to the bucket.
        status, refused = agent.call("/load_model", model_id="tiny")
        assert (status, refused["error"]["code"]) == (503, "MODEL_UNAVAILABLE")
        assert "the request to load it has no signed URLs" in refused["error"]["message"]
        chat = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        status, answer = post(f"http://127.0.0.1:{fleet.port}/v1/chat/completions", chat, "")
        assert status == 200, answer
        _, report = agent.call("/heartbeat")
        assert (report["takes_signed_urls"], report["wanted_urls"]) == (True, [])
        operator = tokens.authorization(fleet.secret)
        shown = [fleet.get(path, operator).body for path in ("/v1/fleet", "/v1/fleet/events", "/metrics")]
    finally:
        agent.stop()
        code = fleet.close()
    assert code == 0, "".join(fleet.lines)
    # No signature is anywhere: not in what was shown, not in a log, not in any file that a support bundle could have.
    files = [path for home in (front, host) for path in home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.suffix == ".log" for path in files)
    texts = [
        *shown,
        "".join(fleet.lines).encode(),
        "".join(agent.output).encode(),
        *(path.read_bytes() for path in files),
    ]
    assert not [text for text in texts if b"X-Amz-" in text or b"AWS4-HMAC" in text]
