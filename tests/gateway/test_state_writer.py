"""The thread that writes the journal: what it counts as failed, and how it starts again."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from pipeline.faults import points
from stages.gateway.requests.state_writer import StateWriter
from tests.gateway.journal_records import make_spec, open_journal, recovered


def test_failed_writes_and_syncs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the metric of failed operations on state files, which has an alert."""
    target = open_journal(tmp_path)
    monkeypatch.setenv("STARLING_FAULTS", "disk:enospc@journal")
    points.fault_point("disk", "journal")
    assert not target.open(make_spec("req-a"))
    assert not target.open(make_spec("req-b"))
    assert target.errors.count == 2
    monkeypatch.setenv("STARLING_FAULTS", "disk:eio@journal_sync")
    for point in ("journal", "journal_sync"):
        points.fault_point("disk", point)
    writer = StateWriter(target)
    writer.open(make_spec("req-c"))
    writer.sync()
    deadline = time.monotonic() + 60
    while writer.errors != {"journal": 3}:
        assert time.monotonic() < deadline, writer.errors
        time.sleep(0.01)
    writer.close()
    monkeypatch.undo()
    points.fault_point("disk", "journal_sync")  # without a plan
    assert set(recovered(tmp_path)) == {"req-c"}


def test_a_thread_that_cannot_be_started_is_started_at_a_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer, written = StateWriter(open_journal(tmp_path)), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        writer.open(make_spec("req-a"), lambda is_written: written.set())
        writer.sync()
        writer.sync()
    assert not written.is_set()
    writer.sync()
    assert written.wait(60)
    writer.close()
    assert set(recovered(tmp_path)) == {"req-a"}
