"""CPU time, memory and descriptors of the server's processes: for `starling_process_*` and /health.

A stage measures its own process (`metrics.py`). Its descendants (the ranks of a worker, the gateway's parsers) and its
supervisor have no metrics of their own: the gateway reads theirs from /proc for each scrape.

    STAGE              the stage's process
    STAGE/N            its N-th descendant, as in `starling status` and `starling chaos`
    STAGE/supervisor   its supervisor; that of all workers is worker/supervisor
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from pipeline import procfs
from pipeline.observe import status


class Numbers(Protocol):
    """What `measure` needs of `Metrics`."""

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a series."""


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


def measure(numbers: Numbers, name: str, pid: int) -> None:
    """Set the families of one process. Does nothing if it has ended."""
    resident = procfs.resident_bytes(pid)
    if not resident:
        return
    numbers.set("starling_process_cpu_seconds_total", procfs.cpu_s(pid), name)
    numbers.set("starling_process_resident_bytes", resident, name)
    with contextlib.suppress(OSError):
        numbers.set("starling_process_open_fds", procfs.open_fds(pid), name)


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
