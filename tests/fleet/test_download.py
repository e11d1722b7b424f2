"""Downloads over real sockets: every byte is verified, faults are survived, nothing is fetched twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.blobs import retry
from pipeline.blobs.http import HttpStore
from pipeline.blobs.interface import BlobStore
from pipeline.catalog import pulled
from pipeline.catalog.entry import Entry
from pipeline.errors import ConfigError, NotFound, StorageUnavailable
from shm.checkpoint import PIECE_BYTES
from stages.agent.downloads.model import PHASE, _fetch_index, download_model
from starling.cli import cli
from tests.fleet.range_server import Handler, served
from tests.fleet.site import Site

# ------------------------------------------------------------------ what arrives


async def test_a_model_arrives_in_parallel_verified_and_is_not_fetched_again(site: Site) -> None:
    both = threading.Barrier(2)  # two requests at once, or the test fails

    def meet(handler: Handler, body: bytes) -> bool:
        if len(body) == PIECE_BYTES and not both.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(30)
                both.abort()
        return False

    site.server.fault = meet
    arrival = await site.pull()
    assert arrival.report is not None
    assert arrival.report.received == site.entry.weights_bytes
    assert site.is_right()
    assert 2 <= site.server.most_at_once <= 8
    assert site.unfinished == []
    assert not (site.models_dir / f"{site.entry.digest}.bin").stat().st_mode & 0o222
    before = site.server.sent
    assert (await site.pull()).report is None
    assert site.server.sent == before


async def test_a_name_for_a_model_that_is_here_costs_no_byte(site: Site) -> None:
    await site.pull()
    before = site.server.sent
    site.entry = Entry(**{**{f: getattr(site.entry, f) for f in site.entry.__struct_fields__}, "name": "other"})
    assert (await site.pull()).report is None
    assert site.server.sent == before
    records = [record.entry.name for record, _ in pulled.read_all(site.models_dir)]
    assert records == ["other", "tiny"]


# ------------------------------------------------------------------ bad servers


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_store_is_asked_again(site: Site, status: int) -> None:
    left = iter(range(10))

    def busy(handler: Handler, body: bytes) -> bool:
        number = next(left, None)
        if number is None or (number > 2 and handler.path.endswith(".idx")):
            return False
        handler.refuse(status, Retry_After="0")
        return True

    site.server.fault = busy
    await site.pull()
    assert site.is_right()


async def test_pieces_damaged_on_the_way_are_fetched_again(site: Site) -> None:
    seen: set[str] = set()

    def damaged(handler: Handler, body: bytes) -> bool:
        key = f"{handler.path} {handler.headers['Range']}"
        if not handler.path.endswith(".bin") or key in seen:
            return False
        seen.add(key)
        first = int(handler.headers["Range"].removeprefix("bytes=").split("-")[0])
        handler.send_range(first, 1 << 40, body[:-1] + bytes([body[-1] ^ 1]))
        return True

    site.server.fault = damaged
    arrival = await site.pull()
    assert arrival.report is not None
    assert arrival.report.rejected == site.entry.n_pieces
    assert site.is_right()


async def test_a_connection_that_breaks_costs_one_piece(site: Site) -> None:
    left = iter(range(3))

    def cut(handler: Handler, body: bytes) -> bool:
        if not handler.path.endswith(".bin") or next(left, None) is None:
            return False
        handler.send_range(0, 1 << 40, body[: len(body) // 2], length=len(body))
        handler.close_connection = True
        return True

    site.server.fault = cut
    await site.pull()
    assert site.is_right()


async def test_a_file_that_changed_since_its_publication_is_refused_by_name(site: Site) -> None:
    def other(handler: Handler, body: bytes) -> bool:
        if not handler.path.endswith("-00001.bin"):
            return False
        first = int(handler.headers["Range"].removeprefix("bytes=").split("-")[0])
        handler.send_range(first, 1 << 40, bytes(len(body)))
        return True

    site.server.fault = other
    with pytest.raises(StorageUnavailable, match=r"piece \d+ .* differs from its checksum"):
        await site.pull()
    assert not (site.models_dir / f"{site.entry.digest}.idx").exists()
    # What was right is kept: only the rest is fetched later.
    site.server.fault = lambda handler, body: False
    arrival = await site.pull()
    assert arrival.report is not None
    assert arrival.report.received < site.entry.weights_bytes
    assert site.is_right()


async def test_an_index_that_is_not_the_published_one_is_refused(site: Site) -> None:
    def other(handler: Handler, body: bytes) -> bool:
        if not handler.path.endswith(".idx"):
            return False
        handler.send_range(0, len(body), bytes(len(body)))
        return True

    site.server.fault = other
    with pytest.raises(ConfigError, match="does not have the SHA-256"):
        await site.pull()
    assert site.unfinished == []


async def test_a_store_that_lost_a_part_is_an_error(site: Site, tmp_path: Path) -> None:
    with served(tmp_path / "nothing") as empty:
        site.server, right = empty, site.server
        with pytest.raises(NotFound):
            await site.pull()
        site.server = right


# ------------------------------------------------------------------ several sources


async def test_a_mirror_takes_over_from_a_store_that_fails(site: Site) -> None:
    count = iter(range(4))
    with served(site.root) as mirror:
        # The store answers a few requests and then none.
        site.server.fault = lambda handler, body: next(count, None) is None and not handler.refuse(503)  # type: ignore[func-returns-value]
        async with HttpStore(mirror.url) as second:
            arrival = await site.pull(second)
        assert site.is_right()
        assert arrival.report is not None
        assert arrival.report.by_source[mirror.url][0] > 0


async def test_every_store_is_asked_for_the_index_before_one_is_asked_again(site: Site, tmp_path: Path) -> None:
    """One that does not answer delays no other one, and one that does not have it is not asked again."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    def refuse(handler: Handler, body: bytes) -> bool:
        handler.refuse(503)
        return True

    def refuse_once(handler: Handler, body: bytes) -> bool:
        return handler.server.requests[handler.path] == 1 and refuse(handler, body)

    context = site.context()._replace(sleep=sleep, jitter=lambda: 0.5)
    site.server.fault = refuse
    (tmp_path / "empty").mkdir()
    path = f"/{site.entry.index_key}"
    with served(site.root) as mirror, served(tmp_path / "empty") as empty:
        async with HttpStore(empty.url) as first, HttpStore(site.server.url) as second, HttpStore(mirror.url) as third:
            stores: list[BlobStore] = [first, second, third]
            raw, _ = await _fetch_index(site.entry, stores, context)
            assert len(raw) == site.entry.index_bytes
            assert (waits, site.server.requests[path]) == ([], 1)
            mirror.requests.clear()
            mirror.fault = refuse_once
            await _fetch_index(site.entry, stores, context)
            assert waits == [retry.FIRST_S]
            assert (empty.requests[path], site.server.requests[path], mirror.requests[path]) == (2, 3, 2)
            mirror.fault = refuse
            with pytest.raises(StorageUnavailable, match="503"):
                await _fetch_index(site.entry, stores, context)
            assert (empty.requests[path], len(waits)) == (3, retry.ATTEMPTS)


async def test_a_mirror_with_damaged_bytes_is_outvoted_by_checksums(site: Site, tmp_path: Path) -> None:
    def damaged(handler: Handler, body: bytes) -> bool:
        if not handler.path.endswith(".bin"):
            return False
        first = int(handler.headers["Range"].removeprefix("bytes=").split("-")[0])
        handler.send_range(first, 1 << 40, bytes(len(body)))
        return True

    with served(site.root) as mirror:
        site.server.fault = damaged
        async with HttpStore(mirror.url) as second:
            arrival = await site.pull(second)
        assert site.is_right()
        assert arrival.report is not None
        assert arrival.report.by_source[mirror.url] == (site.entry.weights_bytes, 0)


async def test_a_stalled_source_does_not_hold_the_last_pieces(site: Site) -> None:
    released = threading.Event()

    def stall(handler: Handler, body: bytes) -> bool:
        if handler.path.endswith(".bin"):
            released.wait(120)
        return False

    with served(site.root) as mirror:
        site.server.fault = stall
        try:
            async with HttpStore(mirror.url) as second:
                await site.pull(second)
        finally:
            released.set()
        assert site.is_right()


async def test_damaged_pieces_of_the_local_file_are_fetched_and_no_others(site: Site) -> None:
    await site.pull()
    weights = site.models_dir / f"{site.entry.digest}.bin"
    weights.chmod(0o644)
    mapped = os.open(weights, os.O_RDONLY)
    with weights.open("r+b") as file:
        for piece in (2, 9):
            file.seek(piece * PIECE_BYTES + 77)
            file.write(b"decayed")
    before = site.server.sent
    arrival = await site.pull(verify=True)
    assert arrival.report is not None
    assert arrival.report.rejected == 2
    assert site.server.sent - before == 2 * PIECE_BYTES + site.entry.index_bytes
    assert site.is_right()
    # A process that maps the old file keeps it: it is replaced, not written.
    assert os.fstat(mapped).st_nlink == 0
    os.close(mapped)
    assert (await site.pull(verify=True)).report is None


# ------------------------------------------------------------------ interruption


async def test_a_cancelled_download_is_continued(site: Site) -> None:
    """While the server holds its last pieces back."""
    arrived, released = asyncio.Event(), threading.Event()
    count = iter(range(5))

    def hold(handler: Handler, body: bytes) -> bool:
        if handler.path.endswith(".bin") and next(count, None) is None:
            released.wait(120)
        return False

    def progress(phase: str, done: int, total: int) -> None:
        if phase == PHASE and done:  # a piece is on the disk
            arrived.set()

    site.server.fault = hold
    try:
        async with HttpStore(site.server.url) as store:
            task = asyncio.create_task(download_model(site.context(), site.entry, [store], progress))
            await asyncio.wait_for(arrived.wait(), 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    finally:
        released.set()
    assert not (site.models_dir / f"{site.entry.digest}.idx").exists()
    assert site.unfinished == [f"{site.entry.digest}.bin.part"]
    site.server.fault = lambda handler, body: False
    arrival = await site.pull()
    assert arrival.report is not None
    assert arrival.report.received < site.entry.weights_bytes
    assert site.is_right()


@pytest.mark.slow
def test_a_killed_pull_is_continued_without_the_pieces_that_arrived(site: Site, home: Path) -> None:
    """SIGKILL of the real command, while the server holds its last pieces back."""
    holding, released = threading.Event(), threading.Event()
    count = iter(range(6))

    def hold(handler: Handler, body: bytes) -> bool:
        if handler.path.endswith(".bin") and next(count, None) is None:
            holding.set()
            released.wait(120)
        return False

    site.server.fault = hold
    env = {**os.environ, "STARLING_FLEET__BLOBS": site.server.url, "STARLING_FLEET__FREE_MB": "0"}
    command = [sys.executable, "-m", "starling", "pull", "tiny", "--json"]
    root = Path(__file__).resolve().parents[2]
    env["PYTHONPATH"] = str(root)
    part = home / "models" / ".fetch" / f"{site.entry.digest}.bin.part"
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        assert holding.wait(120)
        deadline = time.monotonic() + 120
        while not _pieces_in(part, site) and time.monotonic() < deadline:
            time.sleep(0.02)  # until a piece that was sent is on the disk
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        released.set()
    kept = _pieces_in(part, site)
    assert kept
    assert not (home / "models" / f"{site.entry.digest}.idx").exists()
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert row["received_bytes"] <= site.entry.weights_bytes - kept * PIECE_BYTES
    site.models_dir = home / "models"
    assert site.is_right()


def _pieces_in(part: Path, site: Site) -> int:
    """Pieces of a part file that are right."""
    try:
        data = part.read_bytes()
    except OSError:
        return 0
    whole = b"".join((site.root / site.entry.part_key(number)).read_bytes() for number in range(site.entry.n_parts))
    starts = range(0, len(whole) - PIECE_BYTES, PIECE_BYTES)
    return sum(data[at : at + PIECE_BYTES] == whole[at : at + PIECE_BYTES] for at in starts)


async def test_what_a_crash_left_is_adopted(site: Site) -> None:
    """A `.bin` without its index, and a part file with wrong bytes in it."""
    await site.pull()
    (site.models_dir / f"{site.entry.digest}.idx").unlink()
    part = site.models_dir / ".fetch" / f"{site.entry.digest}.bin.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(b"garbage" * 3_000_000)
    before = site.server.sent
    await site.pull()
    assert site.is_right()
    assert site.server.sent - before == site.entry.index_bytes
    assert site.unfinished == []


# ------------------------------------------------------------------ the command


def test_pull_and_configure(site: Site, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_FLEET__BLOBS", site.server.url)
    monkeypatch.setenv("STARLING_FLEET__FREE_MB", "0")
    run = CliRunner().invoke
    missing = run(cli, ["pull", "other"], standalone_mode=False)
    assert "published models: tiny" in str(missing.exception)
    monkeypatch.setenv("STARLING_MODELS__0__NAME", "mine")
    monkeypatch.setenv("STARLING_MODELS__0__PATH", "catalog:tiny")
    assert json.loads(run(cli, ["models", "--json"]).output)[0]["present"] is False
    fetched = run(cli, ["fetch"], standalone_mode=False, catch_exceptions=False)
    assert f"mine: {home / 'models' / site.entry.digest}.idx" in fetched.output
    (row,) = json.loads(run(cli, ["models", "--json"]).output)
    assert (row["present"], row["ingested"], row["digest"]) == (True, True, site.entry.digest)
    (again,) = json.loads(run(cli, ["pull", "tiny", "--json"], catch_exceptions=False).output)
    assert (again["received_bytes"], again["digest"]) == (0, site.entry.digest)
    verified = run(cli, ["verify"], standalone_mode=False)
    assert verified.return_value == 0
    assert "is intact" in verified.output
    site.models_dir = home / "models"
    assert site.is_right()
