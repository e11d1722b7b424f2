"""The memory and CPU time of processes that have no metrics of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import procfs
from pipeline.observe import process_use
from pipeline.observe.metrics import Metrics
from pipeline.observe.process_use import ProcessTotals
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
        values = look(run_dir, ProcessTotals(Metrics("gateway", None)))
        assert values["starling_process_resident_bytes", name] > 48 << 20
        assert values["starling_process_private_bytes", name] > 48 << 20
        assert values["starling_process_open_fds", name] >= 3
        assert process_use.memory_bytes(run_dir, arenas) - alone > 40 << 20
        (arenas / "m.kv").write_bytes(bytes(4 << 20))
        assert process_use.memory_bytes(run_dir, arenas) - alone > 44 << 20
        rank.communicate()
    assert ("starling_process_resident_bytes", name) not in look(run_dir, ProcessTotals(Metrics("gateway", None)))


def look(run_dir: Path, totals: ProcessTotals) -> dict[tuple[str, ...], float]:
    """Values by family and labels, of gauges and of counters."""
    gauges = Metrics("", None)
    totals.measure(run_dir, gauges)
    families = {**gauges.snapshot().families, **totals._numbers.snapshot().families}
    return {(family, *series.labels): series.value for family, several in families.items() for series in several}


def test_counters_go_on_with_the_next_process_and_the_next_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is replaced, the gateway is killed, a rank is replaced meanwhile: no counter goes back or counts twice."""
    cpu_s = {11: 5.0}
    disk = {11: (100, 10)}
    monkeypatch.setattr(process_use, "other_processes", lambda _: [("worker-m/1", pid) for pid in cpu_s])
    monkeypatch.setattr(process_use, "process_ticks", lambda pid: pid * 100)
    monkeypatch.setattr(process_use.procfs, "resident_and_anonymous_bytes", lambda *_: (1, 1))
    monkeypatch.setattr(process_use.procfs, "cpu_s", lambda pid: cpu_s[pid])
    monkeypatch.setattr(process_use.procfs, "disk_bytes", lambda pid=0: disk.get(pid, (0, 0)))

    def replace(pid: int, seconds: float, written: int) -> None:
        cpu_s.clear()
        cpu_s[pid], disk[pid] = seconds, (0, written)

    def counted(totals: ProcessTotals) -> tuple[float, float, float]:
        values = look(tmp_path, totals)
        totals._numbers.publish()
        read, written = (values["starling_process_io_bytes_total", "worker-m/1", one] for one in ("read", "written"))
        return values["starling_process_cpu_seconds_total", "worker-m/1"], read, written

    totals = ProcessTotals(Metrics("gateway", tmp_path))
    assert counted(totals) == (5, 100, 10)
    assert counted(totals) == (5, 100, 10)
    replace(12, 2.0, 1)
    assert counted(totals) == (7, 100, 11)
    totals = ProcessTotals(Metrics("gateway", tmp_path))  # of the gateway's successor
    cpu_s[12] = 3.0
    assert counted(totals) == (8, 100, 11)
    totals = ProcessTotals(Metrics("gateway", tmp_path))
    replace(13, 0.5, 4)
    assert counted(totals) == (8.5, 100, 15)


def test_bytes_of_disks_are_counted(tmp_path: Path) -> None:
    before = procfs.disk_bytes()
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    assert procfs.disk_bytes() >= before
    assert procfs.disk_bytes(2**22 + 1) == (0, 0)
