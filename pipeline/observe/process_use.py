"""CPU time, memory and descriptors of the server's processes: for `starling_process_*` and /health.

A stage measures its own process (`metrics.py`). Its descendants (the ranks of a worker, the gateway's parsers) and its
supervisor have no metrics of their own: the gateway reads theirs from /proc for each scrape.

    STAGE              the stage's process
    STAGE/N            its N-th descendant, as in `starling status` and `starling chaos`
    STAGE/supervisor   its supervisor; that of all workers is worker/supervisor
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline import procfs
from pipeline.observe import status
from pipeline.observe.metrics import MAX_SERIES, Metrics, Series
from shm.arena import process_ticks


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
            yield f"{record.stage.partition('-')[0]}/supervisor", record.parent


class ProcessTotals:
    """Measures these processes into `numbers`. Their counters go on when a process is replaced, this one included.

    A counter is the sum of what was added between two looks. What each process had counted at the last look is noted
    in the snapshot of `numbers`, where a successor finds it.
    """

    def __init__(self, numbers: Metrics) -> None:
        self._numbers = numbers
        self._known: dict[str, _Known] = {}  # by name
        for note in numbers.past_notes:
            with contextlib.suppress(ValueError):
                name, pid, ticks = note.labels
                self._known[name] = _Known(int(pid), int(ticks), note.value, *note.counts)

    def measure(self, run_dir: Path, gauges: Metrics) -> None:
        """Look at all processes that live. `gauges` gets what ends with them."""
        for name, pid in other_processes(run_dir):
            ticks = process_ticks(pid)
            resident, private = procfs.resident_and_anonymous_bytes(pid)
            if not ticks or not resident:
                continue
            gauges.set("starling_process_resident_bytes", resident, name)
            gauges.set("starling_process_private_bytes", private, name)
            with contextlib.suppress(OSError):
                gauges.set("starling_process_open_fds", procfs.open_fds(pid), name)
                gauges.set("starling_process_max_fds", resource.prlimit(pid, resource.RLIMIT_NOFILE)[0], name)
            if (started_at := procfs.started_at(pid)) is not None:
                gauges.set("starling_process_start_time_seconds", started_at, name)
            self._add(name, _Known(pid, ticks, procfs.cpu_s(pid), *procfs.disk_bytes(pid)))
        self._numbers.notes = [
            Series((name, str(one.pid), str(one.ticks)), one.cpu_s, [one.read, one.written])
            for name, one in self._known.items()
        ]

    def _add(self, name: str, now: _Known) -> None:
        last = self._known.get(name)
        if last is None or (last.pid, last.ticks) != (now.pid, now.ticks):
            last = _Known(now.pid, now.ticks)
        if name in self._known or len(self._known) < MAX_SERIES:
            self._known[name] = now
        add = self._numbers.add
        add("starling_process_cpu_seconds_total", name, amount=max(0.0, now.cpu_s - last.cpu_s))
        add("starling_process_io_bytes_total", name, "read", amount=max(0, now.read - last.read))
        add("starling_process_io_bytes_total", name, "written", amount=max(0, now.written - last.written))


class _Known(NamedTuple):
    """A process at the last look."""

    pid: int
    ticks: int
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
