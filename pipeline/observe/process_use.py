"""CPU time, memory and descriptors of the server's processes: for `starling_process_*` and /health.

A stage measures its own process (`metrics.py`). Its descendants (the ranks of a worker, the gateway's parsers) and its
supervisor have no metrics of their own: the gateway reads theirs from /proc for each scrape.

    STAGE              the stage's process
    STAGE/N            its N-th descendant, as in `starling status` and `starling chaos`
    STAGE/supervisor   its supervisor; each worker group has one
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline import procfs
from pipeline.observe import status
from pipeline.observe.metrics import Metrics, Series
from shm.arena import process_ticks

_CPU, _IO = "starling_process_cpu_seconds_total", "starling_process_io_bytes_total"


def other_processes(run_dir: Path) -> Iterator[tuple[str, int]]:
    """(name, pid) of the processes that do not measure themselves."""
    supervisors: set[int] = set()
    for record in status.read_all(run_dir):
        if not record.alive:
            continue
        for number, pid in enumerate(procfs.process_tree(record.pid)[1:], 1):
            yield f"{record.stage}/{number}", pid
        if record.parent > 1 and record.parent not in supervisors:
            supervisors.add(record.parent)
            yield f"{record.stage}/supervisor", record.parent


class ProcessTotals:
    """Measures these processes into `numbers`. Their counters go on when a process is replaced, this one included.

    A counter is the sum of what its processes have used between two measurements.  What each process had used at the
    last one is noted in the snapshot of `numbers`, where a successor finds it.  The note is by pid and start, because
    the name of a process changes when one before it ends.
    """

    def __init__(self, numbers: Metrics) -> None:
        self._numbers = numbers
        self._last: dict[_Process, _Use] = {}  # of the processes that have not ended
        for note in numbers.past_notes:
            with contextlib.suppress(ValueError):
                *_, pid, ticks = note.labels  # of an earlier release with a name before them
                self._last[_Process(int(pid), int(ticks))] = _Use(note.value, *note.counts)

    def measure(self, run_dir: Path, gauges: Metrics) -> None:
        """Measure all processes that live. `gauges` gets what ends with them."""
        measured: dict[_Process, str] = {}
        for name, pid in other_processes(run_dir):
            one = _Process(pid, process_ticks(pid))
            resident, private = procfs.resident_and_anonymous_bytes(pid)
            if not one.ticks or not resident:
                continue
            gauges.set("starling_process_resident_bytes", resident, name)
            gauges.set("starling_process_private_bytes", private, name)
            with contextlib.suppress(OSError):
                gauges.set("starling_process_open_fds", procfs.open_fds(pid), name)
                gauges.set("starling_process_max_fds", resource.prlimit(pid, resource.RLIMIT_NOFILE)[0], name)
            if (started_at := procfs.started_at(pid)) is not None:
                gauges.set("starling_process_start_time_seconds", started_at, name)
            self._add(name, one, _Use(procfs.cpu_s(pid), *procfs.disk_bytes(pid)))
            measured[one] = name
        # Those without a name now will have one again: a supervisor restarts its stage.
        self._last = {
            one: use for one, use in self._last.items() if one in measured or process_ticks(one.pid) == one.ticks
        }
        self._drop_removed(run_dir, set(measured.values()))
        self._numbers.notes = [
            Series((str(one.pid), str(one.ticks)), use.cpu_s, [use.read, use.written])
            for one, use in self._last.items()
        ]

    def _add(self, name: str, one: _Process, use: _Use) -> None:
        last = self._last.get(one, _Use())
        self._last[one] = use
        add = self._numbers.add
        add(_CPU, name, amount=max(0.0, use.cpu_s - last.cpu_s))
        add(_IO, name, "read", amount=max(0, use.read - last.read))
        add(_IO, name, "written", amount=max(0, use.written - last.written))

    def _drop_removed(self, run_dir: Path, names: set[str]) -> None:
        """Drop the counters of stages whose files are removed, as those of an unloaded model are. `names` live."""
        if self._numbers.path is None:
            return
        for labels in self._numbers.label_sets(_CPU):
            name = labels[0]
            stage, separator, _ = name.rpartition("/")
            files = self._numbers.path.with_name(f"{stage}.metrics"), run_dir / f"{stage}.status"
            if separator and name not in names and not any(path.exists() for path in files):
                self._numbers.drop(_CPU, name)
                for direction in ("read", "written"):
                    self._numbers.drop(_IO, name, direction)


class _Process(NamedTuple):
    """Identifies a process: pids are used again, with other ticks."""

    pid: int
    ticks: int


class _Use(NamedTuple):
    """What a process has used since its start."""

    cpu_s: float = 0.0
    read: int = 0  # bytes, from disks
    written: int = 0


def memory_bytes(run_dir: Path, arena_dir: Path) -> int:
    """Memory of the whole server: what each process has for itself, and the arenas once.

    Weights are not counted: they are pages of a file, which the kernel can drop.
    """
    stages = [record.pid for record in status.read_all(run_dir) if record.alive]
    total = sum(procfs.anonymous_bytes(pid) for pid in {*stages, *(pid for _, pid in other_processes(run_dir))})
    with contextlib.suppress(OSError):
        for path in arena_dir.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_blocks * 512
    return total
