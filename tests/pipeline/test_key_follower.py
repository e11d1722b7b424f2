"""Looks at the key file in a thread: fresh for each request, shared, and one wait for a slow disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.api import key_follower
from pipeline.api.key_file import KeyFile, Look
from pipeline.api.key_follower import KeyFollower
from pipeline.runtime import file_watch
from pipeline.runtime.file_watch import FileWatch

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


def look_count(file: Gated, follower: KeyFollower) -> int:
    """The looks of a request that comes now."""
    before = file.looks
    asyncio.run(follower.refresh())
    return file.looks - before


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("x"),
        lambda path: os.replace(path.with_name("other"), path),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o600),
        lambda path: shutil.rmtree(path.parent),
        lambda path: path.parent.rename(path.parent.with_name("gone")),
    ],
    ids=["written", "replaced", "removed", "mode", "directory removed", "directory renamed"],
)
def test_a_watched_file_is_looked_at_after_each_change_of_it(tmp_path: Path, change: Callable[[Path], object]) -> None:
    path = tmp_path / "state" / "keys.json"
    path.parent.mkdir()
    for name in (path.name, "other"):
        path.with_name(name).write_text(name)
    file = Gated(path)
    follower = KeyFollower(file, lambda: 0.0, FileWatch(path))
    assert look_count(file, follower) == 1  # from here on it is watched
    path.with_name("other").write_text("not the key file")
    assert [look_count(file, follower) for _ in range(3)] == [0, 0, 0]
    change(path)
    assert look_count(file, follower) == 1


def test_what_the_kernel_does_not_report_is_looked_at_now_and_then(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "keys.json"
    file = Gated(path)
    follower = KeyFollower(file, lambda: now, FileWatch(path))

    async def run() -> None:
        nonlocal now
        await follower.refresh()
        looks = file.looks
        now = 0.9 * key_follower.UNSEEN_S
        await follower.refresh()
        assert file.looks == looks
        now = key_follower.UNSEEN_S
        file.opened.clear()
        await asyncio.wait_for(follower.refresh(), LONG_S)  # does not wait for that look
        file.opened.set()
        while follower._taken < 2:
            await asyncio.sleep(0)
        assert file.looks == looks + 1

    asyncio.run(run())


def test_directories_on_the_way_to_the_file_may_be_made_later(tmp_path: Path) -> None:
    path = tmp_path / "home" / "state" / "keys.json"
    file = Gated(path)
    follower = KeyFollower(file, lambda: 0.0, FileWatch(path))
    assert [look_count(file, follower) for _ in range(3)] == [1, 0, 0]
    # Another directory is watched then, which is a reason for one more look.
    for make, more in ((path.parent.parent.mkdir, 1), (path.parent.mkdir, 1), (path.touch, 0)):
        make()
        assert [look_count(file, follower) for _ in range(3)] == [1, more, 0]


def test_each_request_looks_where_the_file_is_a_link(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.symlink_to(tmp_path / "elsewhere")
    file = Gated(path)
    follower = KeyFollower(file, lambda: 0.0, FileWatch(path))
    assert [look_count(file, follower) for _ in range(3)] == [1, 1, 1]


def test_without_room_for_a_watch_each_request_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    monkeypatch.setattr(file_watch._libc, "inotify_init1", lambda flags: -1)
    file = Gated(path)
    follower = KeyFollower(file, lambda: 0.0, FileWatch(path))
    assert [look_count(file, follower) for _ in range(3)] == [1, 1, 1]
