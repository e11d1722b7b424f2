"""CPU time and memory of a process and its descendants."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline import procfs


def test_cpu_and_memory_of_a_process_and_what_is_below_it() -> None:
    code = (
        "import subprocess, sys; block = bytearray(32 << 20)\n"
        "while sum(range(10000)) and __import__('time').process_time() < 0.2: pass\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE); print('up', flush=True); sys.stdin.read()\n"
        "child.communicate()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert len(procfs.process_tree(process.pid)) == 2
        assert procfs.cpu_s(process.pid) >= 0.15
        assert procfs.memory_bytes(process.pid) > 32 << 20
        process.communicate()
    assert (procfs.cpu_s(process.pid), procfs.memory_bytes(process.pid)) == (0.0, 0)


def test_waits_for_a_core_are_those_of_a_thread_and_of_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts them in ns, in the second field of a thread's file."""
    counted: dict[int, bytes] = {}
    opened: dict[int, int] = {}
    real_open = os.open

    def open_counted(path: str, flags: int) -> int:
        fd = real_open(path, flags)
        opened[fd] = int(path.split("/")[4])
        return fd

    with ThreadPoolExecutor(1) as thread:
        counted[os.getpid()] = b"7 2000000000 3\n"
        counted[thread.submit(threading.get_native_id).result()] = b"9 500000000 1\n"
        monkeypatch.setattr(procfs.os, "open", open_counted)
        waits = thread.submit(procfs.CoreWaits).result()
        monkeypatch.undo()
        assert sorted(opened.values()) == sorted(counted)
        assert 0 <= waits() <= waits()
        monkeypatch.setattr(procfs.os, "pread", lambda fd, size, offset: counted[opened[fd]])
        assert waits() == 2.5
        monkeypatch.setattr(procfs.os, "pread", lambda fd, size, offset: b"")  # a kernel that does not count them
        assert waits() == 0.0
    waits.close()
    waits.close()
    for fd in opened:
        with pytest.raises(OSError):
            os.fstat(fd)
