"""Resources of the server during a run: memory, descriptors, and files in shared memory and on disk must not grow.

They are recorded by the name of the stage, because a killed stage has a successor with another pid. Supervisors and the
gateway live through the whole run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.observe.status import read_all

MIB = 1 << 20


@dataclass(frozen=True)
class Use:
    """Resources of a stage with its ranks, of its supervisor, or of a directory. Unknown numbers are 0."""

    rss_bytes: int = 0  # resident set size: shared pages count in full
    pss_bytes: int = 0  # proportional set size: shared pages count by their share
    descriptors: int = 0  # of a directory: its files
    processes: int = 0
    file_bytes: int = 0  # of a directory: allocated bytes of its files

    def __add__(self, other: Use) -> Use:
        return Use(*(a + b for a, b in zip(self.numbers(), other.numbers())))

    def numbers(self) -> tuple[int, int, int, int, int]:
        """The fields in order."""
        return self.rss_bytes, self.pss_bytes, self.descriptors, self.processes, self.file_bytes


def of_process(pid: int) -> Use:
    """Resources of one process; zeros if it has ended."""
    try:
        descriptors = procfs.open_fds(pid)
    except OSError:
        return Use()
    return Use(procfs.resident_bytes(pid), procfs.memory_bytes(pid), descriptors, 1)


def of_directory(directory: Path) -> Use:
    """Files and bytes below a directory."""
    total = files = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
                files += 1
            except OSError:
                continue
    return Use(descriptors=files, file_bytes=total)


def measure(config: Config) -> dict[str, Use]:
    """Resources by name: stages, `STAGE, parent` (its supervisor), "shared memory" and "state" (directories)."""
    found: dict[str, Use] = {}
    for record in read_all(paths.run_dir(config)):
        if not record.alive:
            continue
        # A worker's name changes with the version of its model: all workers share one line.
        name = "workers" if record.stage.startswith("worker") else record.stage
        use = sum((of_process(pid) for pid in procfs.process_tree(record.pid)), Use())
        found[name] = found.get(name, Use()) + use
        if record.parent > 1:
            found[f"{name}, parent"] = found.get(f"{name}, parent", Use()) + of_process(record.parent)
    found["shared memory"] = of_directory(paths.arena_dir(config))
    found["state"] = of_directory(paths.state_dir(config))
    return found


class UsageHistory:
    """First, last and largest value of every resource. Call `sample` every few seconds."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.first: dict[str, Use] = {}
        self.last: dict[str, Use] = {}
        self.most: dict[str, Use] = {}

    def sample(self) -> None:
        """Record the present values. A stage that is being restarted keeps its last ones."""
        for name, use in measure(self._config).items():
            self.first.setdefault(name, use)
            self.last[name] = use
            most = self.most.get(name, use)
            self.most[name] = Use(*map(max, most.numbers(), use.numbers()))

    def rows(self) -> list[dict[str, object]]:
        """A row for each name, with `_start`, `_end` and `_most` of each resource (MiB)."""
        rows: list[dict[str, object]] = []
        for name in sorted(self.last):
            row: dict[str, object] = {"name": name}
            for when, uses in (("start", self.first), ("end", self.last), ("most", self.most)):
                use = uses[name]
                row |= {
                    f"rss_mb_{when}": round(use.rss_bytes / MIB, 1),
                    f"pss_mb_{when}": round(use.pss_bytes / MIB, 1),
                    f"descriptors_{when}": use.descriptors,
                    f"file_mb_{when}": round(use.file_bytes / MIB, 1),
                }
            rows.append(row)
        return rows
