"""The memory and CPU time of processes that have no metrics of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import procfs
from pipeline.observe import process_use
from pipeline.observe.metrics import MAX_SERIES, Metrics
from pipeline.observe.process_use import ProcessTotals
from pipeline.observe.status import StatusFile
from pipeline.protocol.messages import Heartbeat

SCRIPT = "import sys; block = bytearray(48 << 20); print('up', flush=True); sys.stdin.read()"
CPU = "starling_process_cpu_seconds_total"


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


class Machine:
    """Processes that do not exist: (name, pid), and what each pid has used since its start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named: list[tuple[str, int]] = []
        self.cpu_s: dict[int, float] = {}
        self.disk: dict[int, tuple[int, int]] = {}
        monkeypatch.setattr(process_use, "other_processes", lambda _: list(self.named))
        monkeypatch.setattr(process_use, "process_ticks", lambda pid: pid * 100 if pid in self.cpu_s else 0)
        monkeypatch.setattr(process_use.procfs, "resident_and_anonymous_bytes", lambda *_: (1, 1))
        monkeypatch.setattr(process_use.procfs, "cpu_s", lambda pid: self.cpu_s[pid])
        monkeypatch.setattr(process_use.procfs, "disk_bytes", lambda pid=0: self.disk.get(pid, (0, 0)))

    def run(self, cpu_s: dict[int, float], *names: str) -> None:
        """These processes run, with these names; all others have ended."""
        self.cpu_s = cpu_s
        self.named = list(zip(names, cpu_s, strict=True))

    def counted(self, totals: ProcessTotals, run_dir: Path) -> dict[str, float]:
        """CPU seconds by name, measured now."""
        values = look(run_dir, totals)
        return {name: value for (family, name, *_), value in values.items() if family == CPU and name != "gateway"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_counters_go_on_with_the_next_process_and_the_next_gateway(tmp_path: Path, machine: Machine) -> None:
    """A rank is replaced, the gateway is killed, a rank is replaced meanwhile: no counter goes back or counts twice."""

    def replace(pid: int, seconds: float, written: int) -> None:
        machine.run({pid: seconds}, "worker-m/1")
        machine.disk[pid] = 0, written

    def counted(totals: ProcessTotals) -> tuple[float, float, float]:
        values = look(tmp_path, totals)
        totals._numbers.publish()
        read, written = (values["starling_process_io_bytes_total", "worker-m/1", one] for one in ("read", "written"))
        return values[CPU, "worker-m/1"], read, written

    machine.run({11: 5.0}, "worker-m/1")
    machine.disk[11] = 100, 10
    totals = ProcessTotals(Metrics("gateway", tmp_path))
    assert counted(totals) == (5, 100, 10)
    assert counted(totals) == (5, 100, 10)
    replace(12, 2.0, 1)
    assert counted(totals) == (7, 100, 11)
    totals = ProcessTotals(Metrics("gateway", tmp_path))  # of the gateway's successor
    machine.cpu_s[12] = 3.0
    assert counted(totals) == (8, 100, 11)
    totals = ProcessTotals(Metrics("gateway", tmp_path))
    replace(13, 0.5, 4)
    assert counted(totals) == (8.5, 100, 15)


def test_processes_of_one_name_are_added_up_once(tmp_path: Path, machine: Machine) -> None:
    totals = ProcessTotals(Metrics("gateway", tmp_path))
    machine.run({11: 5.0, 12: 3.0}, "worker-m/supervisor", "worker-m/supervisor")
    for _ in range(3):
        assert machine.counted(totals, tmp_path) == {"worker-m/supervisor": 8}


def test_a_process_whose_name_changes_is_not_counted_again(tmp_path: Path, machine: Machine) -> None:
    """Descendants are numbered in their order: the one after a helper that ended has another number then."""
    totals = ProcessTotals(Metrics("gateway", tmp_path))
    machine.run({11: 5.0, 12: 30.0}, "scheduler/1", "scheduler/2")
    assert machine.counted(totals, tmp_path) == {"scheduler/1": 5, "scheduler/2": 30}
    machine.run({12: 31.0, 13: 2.0}, "scheduler/1", "scheduler/2")
    assert machine.counted(totals, tmp_path) == {"scheduler/1": 6, "scheduler/2": 32}


def test_a_supervisor_is_not_counted_again_after_a_restart_of_its_stage(tmp_path: Path, machine: Machine) -> None:
    """It has no name while the stage has no record of a living process."""
    totals = ProcessTotals(Metrics("gateway", tmp_path))
    machine.run({11: 5.0}, "kv/supervisor")
    assert machine.counted(totals, tmp_path) == {"kv/supervisor": 5}
    (tmp_path / "kv.status").touch()  # of the process that has died
    machine.named = []
    machine.counted(totals, tmp_path)
    machine.run({11: 6.0}, "kv/supervisor")
    totals._numbers.publish()
    for successor in (totals, ProcessTotals(Metrics("gateway", tmp_path))):
        assert machine.counted(successor, tmp_path) == {"kv/supervisor": 6}


def test_more_processes_than_label_sets_are_counted_once(tmp_path: Path, machine: Machine) -> None:
    totals = ProcessTotals(Metrics("gateway", tmp_path))
    pids = range(1, MAX_SERIES + 9)
    machine.run(dict.fromkeys(pids, 2.0), *(f"worker-m/{pid}" for pid in pids))
    first = machine.counted(totals, tmp_path)
    assert first["other"] == 2 * 8
    assert machine.counted(totals, tmp_path) == first


def test_the_series_of_an_unloaded_model_make_room(tmp_path: Path, machine: Machine) -> None:
    """The worker pool removes the files of a version; those of a stage that is only down stay."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("worker-m@1.metrics", "worker-m@2.metrics"):
        (tmp_path / name).touch()
    totals = ProcessTotals(Metrics("gateway", tmp_path))
    machine.run({11: 5.0, 12: 7.0}, "worker-m@1/1", "worker-m@2/1")
    both = {"worker-m@1/1": 5, "worker-m@2/1": 7}
    assert machine.counted(totals, run_dir) == both
    machine.run({})
    assert machine.counted(totals, run_dir) == both
    totals._numbers.publish()
    (tmp_path / "worker-m@1.metrics").unlink()
    for one in (totals, ProcessTotals(Metrics("gateway", tmp_path))):  # also in what a predecessor has counted
        assert machine.counted(one, run_dir) == {"worker-m@2/1": 7}
    families = totals._numbers.snapshot().families
    names = {series.labels[0] for series in families["starling_process_io_bytes_total"]}
    assert names == {"worker-m@2/1", "gateway"}


def test_bytes_of_disks_are_counted(tmp_path: Path) -> None:
    before = procfs.disk_bytes()
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    assert procfs.disk_bytes() >= before
    assert procfs.disk_bytes(2**22 + 1) == (0, 0)
