"""Looks at the key file in a thread: fresh for each request, shared, and one wait for a slow disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from pipeline.api import key_follower
from pipeline.api.key_file import KeyFile, Look
from pipeline.api.key_follower import KeyFollower

LONG_S = 60.0


class Gated(KeyFile):
    """A key file whose disk stands still unless `opened` is set; counts the looks."""

    def __init__(self, path: Path) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.opened.set()
        self.looks = 0
        super().__init__(path)

    def look(self) -> Look:
        self.looks += 1
        self.reached.set()
        assert self.opened.wait(LONG_S)
        return super().look()


async def reached(file: Gated) -> None:
    await asyncio.to_thread(file.reached.wait, LONG_S)
    file.reached.clear()


def test_calls_during_a_look_share_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_follower, "WAIT_S", LONG_S)
    file = Gated(tmp_path / "keys.json")

    async def run() -> None:
        follower = KeyFollower(file)
        file.looks = 0
        file.reached.clear()
        file.opened.clear()
        first = asyncio.ensure_future(follower.refresh())
        await reached(file)
        others = [asyncio.ensure_future(follower.refresh()) for _ in range(50)]
        await asyncio.sleep(0)  # all have begun to wait
        assert file.looks == 1
        file.opened.set()
        await asyncio.gather(first, *others)
        assert file.looks == 2
        await follower.refresh()
        assert file.looks == 3

    asyncio.run(run())


def test_a_disk_that_stands_still_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_follower, "WAIT_S", 0.01)
    file = Gated(tmp_path / "keys.json")
    now = 0.0

    async def run() -> None:
        nonlocal now
        follower = KeyFollower(file, lambda: now)
        file.looks = 0
        file.reached.clear()
        file.opened.clear()
        first = asyncio.ensure_future(follower.refresh())
        await reached(file)
        now = 1.0
        await first
        for _ in range(100):
            await follower.refresh()
        assert file.looks == 1
        file.opened.set()
        now = 2.0
        while follower._taken < 1:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(key_follower, "WAIT_S", LONG_S)
        await follower.refresh()
        assert file.looks == 2

    asyncio.run(run())


def test_a_cancelled_call_leaves_the_look_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_follower, "WAIT_S", LONG_S)
    file = Gated(tmp_path / "keys.json")

    async def run() -> None:
        follower = KeyFollower(file)
        file.reached.clear()
        file.opened.clear()
        first = asyncio.ensure_future(follower.refresh())
        await reached(file)
        second = asyncio.ensure_future(follower.refresh())
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        file.opened.set()
        await second

    asyncio.run(run())
