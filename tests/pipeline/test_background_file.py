"""Log lines that a thread writes: in order, bounded, never waited for, and complete at the end."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from pipeline.observe import background_file
from pipeline.observe.background_file import MAX_WAITING, BackgroundFile
from pipeline.observe.log_output import RotatingFile

LONG_S = 60.0


class Gated:
    """A file whose disk stands still until `opened` is set."""

    def __init__(self) -> None:
        self.lost = 0
        self.lines: list[bytes] = []
        self.reached, self.opened = threading.Event(), threading.Event()
        self.is_closed = False

    def write(self, line: bytes) -> None:
        self.reached.set()
        assert self.opened.wait(LONG_S)
        self.lines.append(line)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def patient_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for the thread, which on a busy machine may run later."""
    monkeypatch.setattr(background_file, "CLOSE_S", LONG_S)


def test_lines_are_written_in_order_and_all_before_the_end(tmp_path: Path) -> None:
    file = BackgroundFile(RotatingFile(tmp_path / "a.log", 1 << 20, 1))
    lines = [b"line %d\n" % i for i in range(2000)]
    for line in lines:
        file.write(line)
    file.close()
    file.close()
    assert (tmp_path / "a.log").read_bytes() == b"".join(lines)
    assert file.lost == 0


def test_a_disk_that_stands_still_costs_lines_beyond_a_bound_and_no_time() -> None:
    gated = Gated()
    file = BackgroundFile(gated)
    line = b"x" * 1023 + b"\n"
    for _ in range(2 * MAX_WAITING // len(line)):
        file.write(line)  # would stand still with the disk
    assert gated.reached.wait(LONG_S)
    assert gated.lines == []
    kept = MAX_WAITING // len(line)
    assert file.lost == kept
    gated.opened.set()
    file.close()
    assert gated.lines == [line] * kept
    assert gated.is_closed


def test_the_end_does_not_wait_for_such_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_file, "CLOSE_S", 0.01)
    gated = Gated()
    file = BackgroundFile(gated)
    file.write(b"first\n")
    assert gated.reached.wait(LONG_S)
    file.close()
    assert not gated.is_closed  # the thread still holds it
    file.write(b"late\n")
    assert file.lost == 1
    gated.opened.set()


def test_a_held_file_has_no_thread_and_loses_nothing(tmp_path: Path) -> None:
    for releases in (True, False):  # a process may end before
        path = tmp_path / f"{releases}.log"
        file = BackgroundFile(RotatingFile(path, 1 << 20, 1), is_held=True)
        file.write(b"first\n")
        assert file._thread is None
        assert not path.exists()
        if releases:
            file.start_writing()
            assert file._thread is not None
            file.write(b"second\n")
        file.close()
        assert path.read_bytes() == (b"first\nsecond\n" if releases else b"first\n")


def test_its_thread_takes_no_signal(tmp_path: Path) -> None:
    file = BackgroundFile(RotatingFile(tmp_path / "a.log", 1 << 20, 1))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    file.write(b"line\n")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert file._thread is not None
    status = Path(f"/proc/self/task/{file._thread.native_id}/status").read_text()
    blocked = int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16)  # type: ignore[index]
    assert all(blocked >> number - 1 & 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP))
    file.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12 and later: it has a thread
def test_a_forked_process_writes_its_lines_itself(tmp_path: Path) -> None:
    file = BackgroundFile(RotatingFile(tmp_path / "a.log", 1 << 20, 1))
    file.write(b"parent\n")
    pid = os.fork()
    if not pid:
        file.write(b"child\n")
        file.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    file.close()
    assert sorted((tmp_path / "a.log").read_bytes().splitlines()) == [b"child", b"parent"]


@pytest.mark.parametrize("lines", [[b"first\n"], [b"first\n", b"second\n"]])
def test_a_thread_that_cannot_be_started_loses_no_line(lines: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gated = Gated()
    gated.opened.set()
    file = BackgroundFile(gated)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        file.write(lines[0])
        if len(lines) == 1:
            file.close()
    for line in lines[1:]:
        file.write(line)
    file.close()
    assert gated.lines == lines
