"""A download shown to an engine: what its record allows to read is verified, whatever the server does."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.blobs.folder import FolderStore
from pipeline.blobs.http import HttpStore
from pipeline.catalog import pulled
from pipeline.catalog.publish import publish
from pipeline.errors import StarlingError
from shm.arrival import COMPLETE, FAILED, Arrival, arrival_path
from shm.checkpoint import PIECE_BYTES, load_index, piece_checksum, write_index
from stages.agent.downloads import arriving, model
from stages.agent.downloads.arriving import FOLDER, Showcase, remove_showcase
from stages.agent.downloads.model import Arrival as Arrived
from stages.agent.downloads.model import download_model
from stages.agent.downloads.remaining import KEPT, WINDOW_S, Remaining
from tests.e2e.server import poll_until
from tests.fleet.checkpoints import write_checkpoint
from tests.fleet.range_server import Handler
from tests.fleet.site import Site

LAST = 5  # piece that the tests hold back
TURNS = 100  # of the event loop: a cancelled download that waits for nothing ends in fewer


class Engine:
    """Follows a download as an engine does: at each report it reads all that may be read."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.home = site.models_dir.parent / "engine"
        self.folder: Path | None = None
        self.seen: list[int] = []  # verified bytes
        self.reports: list[int] = []  # bytes that are here
        self.state = 0

    def showcase(self) -> Showcase:
        return Showcase(self.home, self.shown)

    def shown(self, folder: Path) -> None:
        self.folder = folder
        index_path = folder / f"{self.site.entry.digest}.idx"
        self.index = load_index(index_path)
        self.arrival = Arrival(arrival_path(index_path))
        self.data = np.memmap(index_path.with_suffix(".bin"), np.uint8, "r")
        assert self.data.nbytes == self.index.bin_bytes  # its full size from the start

    def look(self) -> None:
        verified, self.state = self.arrival.verified, self.arrival.state
        if self.seen and self.seen[-1] == verified:
            return
        self.seen.append(verified)
        for piece, expected in enumerate(self.index.pieces):
            if min((piece + 1) * PIECE_BYTES, self.index.bin_bytes) <= verified:
                found = self.data[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]
                assert piece_checksum(found.tobytes()) == expected

    def wait(self, pieces: int) -> None:
        """Until so many pieces are here. In another thread."""
        poll_until(lambda: max(self.reports, default=0) >= pieces * PIECE_BYTES)

    async def pull(self) -> Arrived:
        def progress(phase: str, done: int, total: int) -> None:
            if phase == model.PHASE:
                self.reports.append(done)
            if self.folder is not None:
                self.look()

        async with HttpStore(self.site.server.url) as store:
            arrived = await download_model(
                self.site.context(), self.site.entry, [store], progress, showcase=self.showcase()
            )
        if self.folder is not None:
            self.look()
        return arrived


@pytest.fixture
def engine(site: Site) -> Engine:
    return Engine(site)


def piece_of(site: Site, handler: Handler) -> int:
    """The piece that a request asks for; -1: another blob."""
    for part in range(site.entry.n_parts):
        if handler.path.endswith(site.entry.part_key(part)):
            offset = int(handler.headers["Range"].removeprefix("bytes=").split("-")[0])
            return (part * site.entry.part_bytes + offset) // PIECE_BYTES
    return -1


async def test_only_verified_bytes_are_shown(engine: Engine) -> None:
    """The last piece comes when the others are here, and shown, in whatever order they have come."""
    damaged: set[int] = set()

    def fault(handler: Handler, body: bytes) -> bool:
        piece = piece_of(engine.site, handler)
        if piece == engine.site.entry.n_pieces - 1:
            engine.wait(piece)
        if piece != 2 or piece in damaged:
            return False
        damaged.add(piece)
        handler.send_range(piece * PIECE_BYTES, 1 << 40, bytes(len(body)))
        return True

    engine.site.server.fault = fault
    arrived = await engine.pull()
    assert arrived.report is not None
    assert arrived.report.rejected >= 1
    assert engine.seen == sorted(engine.seen)
    assert len(engine.seen) > 2
    assert (engine.seen[-1], engine.state) == (engine.index.bin_bytes, COMPLETE)
    # The file has its place, and the engine's name of it stays until it is removed.
    assert engine.site.is_right()
    assert engine.folder is not None
    (shown,) = engine.folder.glob("*.bin")
    assert os.path.samefile(shown, engine.site.models_dir / shown.name)
    remove_showcase(engine.home)
    assert engine.site.is_right()
    assert not engine.folder.exists()


async def test_a_download_that_fails_is_shown_as_failed_and_continued(engine: Engine) -> None:
    def dies(handler: Handler, body: bytes) -> bool:
        if piece_of(engine.site, handler) < LAST:
            return False
        handler.close_connection = True
        return True

    engine.site.server.fault = dies
    with pytest.raises(StarlingError):
        await engine.pull()
    engine.look()
    assert engine.seen[-1] <= LAST * PIECE_BYTES
    assert engine.state == FAILED

    engine.site.server.fault = lambda handler, body: False
    here = engine.reports[-1]
    assert here > PIECE_BYTES
    engine.seen.clear()
    engine.reports.clear()
    await engine.pull()
    assert (engine.seen[-1], engine.state) == (engine.index.bin_bytes, COMPLETE)
    # What was here is read from the disk: it says nothing of the link.
    assert engine.reports[0] >= here
    assert engine.site.is_right()


async def test_a_download_that_is_cancelled_is_shown_as_failed(engine: Engine) -> None:
    held = asyncio.Event()
    loop = asyncio.get_running_loop()
    free = asyncio.Event()

    def holds(handler: Handler, body: bytes) -> bool:
        if piece_of(engine.site, handler) == LAST:
            loop.call_soon_threadsafe(held.set)
            asyncio.run_coroutine_threadsafe(free.wait(), loop).result()
        return False

    engine.site.server.fault = holds
    pulling = asyncio.create_task(engine.pull())
    await held.wait()
    pulling.cancel()
    await asyncio.wait([pulling])
    free.set()
    assert pulling.cancelled()
    engine.look()
    assert engine.state == FAILED
    assert engine.seen[-1] <= LAST * PIECE_BYTES


async def test_a_download_that_is_cancelled_when_all_is_here_can_be_removed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop, replace = asyncio.get_running_loop(), model.replace_file

    def slow(*arguments: Any, **options: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        replace(*arguments, **options)

    monkeypatch.setattr(model, "replace_file", slow)
    pulling = asyncio.create_task(engine.pull())
    await begun.wait()
    pulling.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([pulling])
    assert pulling.cancelled()
    assert engine.site.is_right()
    assert engine.site.context().cache.remove(engine.site.entry.digest)
    assert not list(engine.site.models_dir.glob("*.bin"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
async def test_a_process_killed_when_a_file_got_its_place_has_recorded_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    class Killed(BaseException):
        """Ends the download at this rename, as SIGKILL does."""

    rename, replace = os.rename, os.replace

    def rename_last(move: Callable[..., None], source: Path, target: Path) -> None:
        move(source, target)
        if Path(target).parent == engine.site.models_dir and Path(target).suffix == suffix:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", partial(rename_last, rename))
        patched.setattr(os, "replace", partial(rename_last, replace))
        with pytest.raises(Killed):
            await engine.pull()
    cache = engine.site.context().cache
    placed = engine.site.models_dir / f"{engine.site.entry.digest}{suffix}"
    assert placed.exists()
    (item,) = cache.items()
    assert (item.key, item.nbytes >= placed.stat().st_blocks * 512) == (engine.site.entry.digest, True)
    await engine.pull()  # as the next load does
    assert engine.site.is_right()
    assert cache.remove(engine.site.entry.digest)
    assert not placed.exists()


async def test_without_a_second_name_the_model_is_downloaded_all_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("stages.agent.downloads.arriving.os.link", refuse)
    async with HttpStore(engine.site.server.url) as store:
        await download_model(
            engine.site.context(), engine.site.entry, [store], lambda *report: None, showcase=engine.showcase()
        )
    assert engine.folder is None
    assert engine.site.is_right()


async def test_a_folder_that_could_not_be_made_is_removed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second name of the file, which is made first, would keep its space from being freed."""

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(arriving, "ArrivalWriter", refuse)
    await engine.pull()
    assert engine.folder is None
    assert not (engine.home / FOLDER).exists()
    assert engine.site.is_right()


async def test_an_index_without_a_vocabulary_is_left_to_the_engine(engine: Engine) -> None:
    """It has all its checksums."""
    path, index = write_checkpoint(engine.site.models_dir.parent / "damaged", 3_000_000)
    write_index(path, msgspec.structs.replace(index, tokenizer_raw=msgspec.Raw(msgspec.msgpack.encode(["spm"]))))
    root = engine.site.models_dir.parent / "store"
    done = await publish(FolderStore(root), path, "damaged", "f", 0, lambda phase, done, total: None)
    async with FolderStore(root) as store:
        await download_model(
            engine.site.context(), done.entry, [store], lambda *report: None, showcase=engine.showcase()
        )
    assert engine.folder is None
    assert not (engine.home / FOLDER).exists()
    assert pulled.is_complete(engine.site.models_dir, done.entry)


async def test_a_folder_is_not_made_after_its_download_was_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop, link = asyncio.get_running_loop(), os.link

    def slow(source: Path, target: Path) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        link(source, target)

    monkeypatch.setattr("stages.agent.downloads.arriving.os.link", slow)
    pulling = asyncio.create_task(engine.pull())
    try:
        await begun.wait()
        pulling.cancel()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert not pulling.done()
    finally:
        go_on.set()
    await asyncio.wait([pulling])
    assert pulling.cancelled()
    # The thread has ended: what it has made can be removed.
    assert sorted(path.suffix for path in (engine.home / FOLDER).iterdir()) == [".arrival", ".bin", ".idx"]
    remove_showcase(engine.home)


def test_the_rest_of_a_download_is_estimated_from_its_last_seconds() -> None:
    now = 0.0
    remaining = Remaining(lambda: now)
    assert remaining.seconds() == float("inf")
    remaining.note(0, 1000)
    assert remaining.seconds() == float("inf")
    now = 2.0
    remaining.note(100, 1000)
    assert remaining.seconds() == pytest.approx(18.0)
    now = 4.0  # nothing has come since
    assert remaining.seconds() == pytest.approx(36.0)
    for _ in range(3 * KEPT):
        now += WINDOW_S / KEPT
        remaining.note(100, 1000)
    assert remaining.seconds() == float("inf")
    remaining.note(1000, 1000)
    assert remaining.seconds() == 0.0


def test_the_rest_of_a_download_takes_at_least_as_long_as_nothing_has_come() -> None:
    now = 0.0
    remaining = Remaining(lambda: now)
    remaining.note(0, 1000)
    now = 1.0
    remaining.note(999, 1000)
    now = 101.0
    assert remaining.seconds() == pytest.approx(100.0)
    remaining.note(999, 1000)  # the same once more
    assert remaining.seconds() == pytest.approx(100.0)
