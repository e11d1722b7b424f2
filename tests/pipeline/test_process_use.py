"""The memory and CPU time of processes that have no metrics of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.observe import process_use
from pipeline.observe.metrics import Metrics
from pipeline.observe.status import StatusFile
from pipeline.protocol.messages import Heartbeat

SCRIPT = "import sys; block = bytearray(48 << 20); print('up', flush=True); sys.stdin.read()"


def test_descendants_and_supervisor_are_named_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, arenas = tmp_path / "run", tmp_path / "arenas"
    run_dir.mkdir(mode=0o700)
    arenas.mkdir()
    before = process_use.memory_bytes(run_dir, arenas)
    assert before == 0
    StatusFile(run_dir, "worker-m").write(Heartbeat("worker-m", 0, 0, False, True))
    alone = process_use.memory_bytes(run_dir, arenas)
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"up\n"
        found = dict(process_use.other_processes(run_dir))
        assert rank.pid in found.values()
        assert os.getpid() not in found.values()
        name = next(name for name, pid in found.items() if pid == rank.pid)
        assert name.startswith("worker-m/")
        numbers = Metrics("gateway", None)
        process_use.measure(numbers, name, rank.pid)
        families = numbers.snapshot().families
        assert families["starling_process_resident_bytes"][0].value > 48 << 20
        assert families["starling_process_open_fds"][0].value >= 3
        assert process_use.memory_bytes(run_dir, arenas) - alone > 40 << 20
        (arenas / "m.kv").write_bytes(bytes(4 << 20))
        assert process_use.memory_bytes(run_dir, arenas) - alone > 44 << 20
        rank.communicate()
    process_use.measure(numbers, "gone", rank.pid)
    assert [series.labels for series in numbers.snapshot().families["starling_process_resident_bytes"]] == [(name,)]
