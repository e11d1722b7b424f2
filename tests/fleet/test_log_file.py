"""The output of an engine as a file: its bounds, and a disk that takes no lines for a while."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.agent.engines.child import Child
from stages.agent.engines.log_file import LogFile
from tests.fleet.coordination_stores import until

LIMIT_S = 60.0


class Disk:
    """That of the log files: it takes nothing until `resume`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self._may_go_on = threading.Event(), threading.Event()
        opened = Path.open

        def open_late(path: Path, *arguments: Any, **named: Any) -> Any:
            if path.name == "engine.log" and arguments == ("ab",):
                self.asked.set()
                assert self._may_go_on.wait(LIMIT_S / 2)
            return opened(path, *arguments, **named)

        monkeypatch.setattr(Path, "open", open_late)

    def resume(self) -> None:
        self._may_go_on.set()


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.resume()


def test_a_log_has_a_bound(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "engine.log", max_bytes=100)
    for number in range(55):
        log.append(b"line %4d\n" % number)
    log.close()
    assert log.wait(LIMIT_S)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(sizes) <= 110 and len(sizes) == 2
    assert b"line   54" in (tmp_path / "engine.log").read_bytes()


def test_lines_wait_for_the_disk_up_to_a_bound(tmp_path: Path, stalled: Disk) -> None:
    log = LogFile(tmp_path / "engine.log", max_waiting=90)
    for number in range(10):
        log.append(b"line %4d\n" % number)
        assert stalled.asked.wait(LIMIT_S)  # the first one is being written, and counts
    for _ in range(3):
        log.append(b"a lost line\n")
    stalled.resume()
    log.close()
    assert log.wait(LIMIT_S)
    lines = (tmp_path / "engine.log").read_text().splitlines()
    assert lines == [f"line {number:4}" for number in range(9)] + [
        "... 4 lines are lost: the disk did not take them in time"
    ]


def test_what_is_lost_is_said_where_it_is_missing(tmp_path: Path, stalled: Disk) -> None:
    path = tmp_path / "engine.log"
    log = LogFile(path, max_waiting=12)
    log.append(b"first line\n")
    log.append(b"lost\n")
    assert stalled.asked.wait(LIMIT_S)
    stalled.resume()
    for _ in range(6000):  # until the first line no longer waits: then another one is taken
        log.append(b"later\n")
        if path.exists() and b"later" in path.read_bytes():
            break
        time.sleep(0.01)
    log.close()
    assert log.wait(LIMIT_S)
    lines = path.read_text().splitlines()
    assert lines[0] == "first line" and "lines are lost" in lines[1] and lines[2] == "later"


def test_a_disk_without_room_loses_lines_alone(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "missing" / "engine.log")
    log.append(b"lost\n")
    log.close()
    assert log.wait(LIMIT_S)
    log.append(b"after the end\n")
    assert list(tmp_path.iterdir()) == []


async def test_an_engine_is_read_while_the_disk_of_its_log_is_busy(tmp_path: Path, stalled: Disk) -> None:
    """Its output, its end and its last lines: none of them waits for the log."""
    log = LogFile(tmp_path / "engine.log")
    child = Child((sys.executable, "-c", "print('one'); print('two')"), {}, tmp_path, log)
    await child.start()
    await until(stalled.asked.is_set)
    assert await child.wait() == 0
    assert await child.last_words_at_end() == "two"
    stopping = asyncio.create_task(child.stop(0.0))
    stalled.resume()
    await stopping
    assert (tmp_path / "engine.log").read_text() == "one\ntwo\n"
