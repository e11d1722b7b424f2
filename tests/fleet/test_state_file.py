"""agent.json: written beside the event loop, with the last state last."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.load import resolve
from stages.agent import state_file
from stages.agent.stage import AgentStage
from stages.agent.state_file import StateFile, Stored, place_of, read_stored, write_stored
from tests.fleet.coordination_stores import until

FIRST = Stored(agent_id="a", incarnation="b")


class BusyDisk:
    """Writes of agent.json begin, and end when they are released, one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[str, ...]] = []
        self.threads: set[int] = set()
        self.error: OSError | None = None
        self._released = threading.Semaphore(0)
        write = state_file.write_stored

        def write_late(agent_dir: Path, stored: Stored) -> None:
            self.threads.add(threading.get_ident())
            self.begun.append(stored.models)
            assert self._released.acquire(timeout=30)
            if self.error is not None:
                raise self.error
            write(agent_dir, stored)

        monkeypatch.setattr(state_file, "write_stored", write_late)

    def release(self, writes: int = 1) -> None:
        self._released.release(writes)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyDisk]:
    found = BusyDisk(monkeypatch)
    yield found
    found.release(100)


def models_in(folder: Path) -> tuple[str, ...]:
    found = read_stored(folder / "agent.json")
    assert found is not None
    return found.models


async def test_the_event_loop_goes_on_while_the_disk_is_busy(tmp_path: Path, disk: BusyDisk) -> None:
    file = StateFile(tmp_path, FIRST, lambda: ("m",))
    storing = asyncio.create_task(file.store())
    await until(lambda: disk.begun == [("m",)])
    assert not storing.done() and threading.get_ident() not in disk.threads
    disk.release()
    await storing
    assert models_in(tmp_path) == ("m",)


async def test_no_earlier_state_replaces_a_later_one(tmp_path: Path, disk: BusyDisk) -> None:
    """Changes during a write are written together by the next one, and those who wait for them wait for it."""
    names = ["m"]
    file = StateFile(tmp_path, FIRST, lambda: tuple(names))
    storing = [asyncio.create_task(file.store())]
    await until(lambda: len(disk.begun) == 1)
    for name in ("n", "o"):
        names.append(name)
        storing.append(asyncio.create_task(file.store()))
        await asyncio.sleep(0)
    assert disk.begun == [("m",)]  # one write at a time: each uses the same temporary file
    disk.release()
    await until(lambda: len(disk.begun) == 2)
    assert models_in(tmp_path) == ("m",) and not any(one.done() for one in storing)
    names.remove("m")
    file.changed()
    disk.release(2)
    await asyncio.gather(*storing)
    assert disk.begun == [("m",), ("m", "n", "o"), ("n", "o")]
    assert models_in(tmp_path) == ("n", "o")


async def test_a_caller_that_leaves_ends_no_write(tmp_path: Path, disk: BusyDisk) -> None:
    file = StateFile(tmp_path, FIRST, lambda: ("m",))
    storing = asyncio.create_task(file.store())
    await until(lambda: len(disk.begun) == 1)
    storing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await storing
    finishing = asyncio.create_task(file.finish())
    await asyncio.sleep(0)
    assert not finishing.done()
    disk.release()
    await finishing
    assert models_in(tmp_path) == ("m",)


async def test_a_disk_that_fails_costs_that_state_alone(tmp_path: Path, disk: BusyDisk) -> None:
    file = StateFile(tmp_path, FIRST, lambda: ("m",))
    disk.error = OSError("no room")
    disk.release(2)
    await file.store()
    assert not (tmp_path / "agent.json").exists()
    disk.error = None
    await file.store()
    assert models_in(tmp_path) == ("m",)


@pytest.mark.parametrize("is_copied", [False, True])
def test_only_the_agent_of_this_directory_is_known_to_be_dead(
    tmp_path: Path, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that wrote the file before it was copied may live: its record is not replaced at once."""
    homes = [tmp_path / "home", tmp_path / "copy"]
    folders = [paths.agent_dir(resolve({}, {}), {"STARLING_HOME": str(home)}) for home in homes]
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True)
    write_stored(folders[0], Stored(agent_id="a", incarnation="before", models=("m",), place=place_of(folders[0])))
    if is_copied:
        shutil.copy(folders[0] / "agent.json", folders[1])
    monkeypatch.setenv("STARLING_HOME", str(homes[is_copied]))
    stage = AgentStage(resolve({}, {}))
    stage._lock.release()
    assert stage._previous == ("" if is_copied else "before")
    assert (stage._stored.agent_id, stage._stored.models) == ("a", ("m",))
