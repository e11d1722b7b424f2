"""Files are synchronized by a thread: no caller waits, each file once, errors are counted."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import background_sync
from pipeline.background_sync import BackgroundSync
from pipeline.faults.points import FaultPoint
from pipeline.files import DiskErrors

log = logging.getLogger("starling.test")


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_files_wait_once_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_sync, "MAX_WAITING", 2)
    gate, hits = threading.Event(), 0
    point = FaultPoint("disk", "sessions_sync")

    def stall(_: int) -> bool:
        nonlocal hits
        hits += 1
        return not gate.wait(60)

    point.trigger = stall
    sync = BackgroundSync(DiskErrors(log, "test"), point.hit)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    open_fds = len(os.listdir("/proc/self/fd"))
    sync.request(tmp_path / "a", fd)
    wait(lambda: hits == 1)  # the thread has it
    for name in ("b", "c", "b", "d"):
        sync.request(tmp_path / name, fd)
    assert sync.skipped == 1
    gate.set()
    wait(lambda: hits == 3)
    wait(lambda: len(os.listdir("/proc/self/fd")) == open_fds)
    sync.request(tmp_path / "e", fd)  # a new thread
    wait(lambda: hits == 4)
    wait(lambda: len(os.listdir("/proc/self/fd")) == open_fds)
    os.close(fd)


def test_an_error_is_counted_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    point = FaultPoint("disk", "sessions_sync")

    def fail(_: int) -> bool:
        raise OSError(5, "Input/output error")

    point.trigger = fail
    errors = DiskErrors(log, "test")
    sync = BackgroundSync(errors, point.hit)
    with open(tmp_path / "file", "wb") as file:
        for i in range(3):
            sync.request(tmp_path / "file", file.fileno())
            wait(lambda i=i: errors.count == i + 1)  # type: ignore[misc]
        point.trigger = None
        assert len(caplog.records) == 1
        sync.request(tmp_path / "file", file.fileno())
        wait(lambda: len(caplog.records) == 2)
    assert caplog.records[1].levelname == "WARNING"


def test_a_thread_that_cannot_be_started_is_started_for_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    errors, synced = DiskErrors(log, "test"), threading.Semaphore(0)
    sync = BackgroundSync(errors, synced.release)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        sync.request(tmp_path / "a", fd)
    assert errors.count == 1
    sync.request(tmp_path / "b", fd)
    assert synced.acquire(timeout=60) and synced.acquire(timeout=60), "both files"
    os.close(fd)
    wait(lambda: not sync._is_running)
