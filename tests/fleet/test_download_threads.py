"""Downloads beside an event loop that must not wait for the disk: it renews the agent's lease."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.catalog import pulled
from pipeline.catalog.adapter_entry import AdapterEntry
from stages.agent.downloads import adapter, model
from stages.agent.downloads.adapter import AdapterSource, bring_adapter
from stages.agent.downloads.model import locked
from tests.fleet.coordination_stores import until
from tests.fleet.site import Site

# What waits for the disk, or for another process that does: synchronization, locks, new files and their removal.
WAITING: tuple[tuple[Any, str], ...] = (
    (os, "fsync"),
    (os, "posix_fallocate"),
    (os, "unlink"),
    (os, "mkdir"),
    (os, "replace"),
    (fcntl, "flock"),
    (pulled, "load_index"),
    (pulled, "read_all"),
    (pulled, "is_complete"),
    (adapter, "make_directory"),
)


@pytest.fixture
def in_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of `WAITING` from the thread of the event loop."""
    found: list[str] = []
    own = threading.get_ident()

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == own:
                found.append(name)
            return call(*arguments, **named)

        return watch

    for module, name in WAITING:
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    return found


async def test_downloads_of_models_wait_for_the_disk_in_threads(site: Site, in_loop: list[str]) -> None:
    assert (await site.pull()).report is not None
    assert (await site.pull()).report is None  # it is here
    assert (await site.pull(verify=True)).report is None  # and right
    assert in_loop == []


async def test_downloads_of_adapters_wait_for_the_disk_in_threads(site: Site, in_loop: list[str]) -> None:
    data = b"adapter"

    async def read(offset: int, nbytes: int) -> bytes:
        return data[offset : offset + nbytes]

    digest = hashlib.sha256(data).hexdigest()
    entry = AdapterEntry(base="m", adapter="a", digest=digest, base_digest="0" * 64, bytes=len(data), rank=1)
    path = await bring_adapter(site.context(), entry, [AdapterSource("here", read)])
    assert path.read_bytes() == data and in_loop == []


async def test_a_download_that_is_cancelled_while_room_is_reserved_leaves_nothing_open(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems write every block for that, while the event loop goes on."""
    begun, may_end = threading.Event(), threading.Event()
    reserve = os.posix_fallocate

    def reserve_late(*arguments: Any) -> None:
        begun.set()
        assert may_end.wait(30)
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", reserve_late)
    pulling = asyncio.create_task(site.pull())
    await until(begun.is_set)
    pulling.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert [path for path in _open_in(site.models_dir) if path.endswith(".part")] == []
    monkeypatch.undo()
    await site.pull()
    assert site.is_right()


async def test_a_lock_that_is_got_for_a_cancelled_download_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    lock = fcntl.flock

    def lock_late(*arguments: Any) -> None:
        begun.set()
        assert may_end.wait(30)
        lock(*arguments)

    async def hold() -> None:
        async with locked(tmp_path, "0" * 64, asyncio.sleep):
            raise AssertionError

    monkeypatch.setattr(model.fcntl, "flock", lock_late)
    holding = asyncio.create_task(hold())
    await until(begun.is_set)
    holding.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert _open_in(tmp_path) == [] and list(tmp_path.iterdir()) == []


def _open_in(folder: Path) -> list[str]:
    """Files below `folder` that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # that of the listing
            continue
        if path.startswith(str(folder)):
            found.append(path)
    return found
