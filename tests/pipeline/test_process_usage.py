"""CPU time and memory of a process and its descendants."""

from __future__ import annotations

import subprocess
import sys

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
