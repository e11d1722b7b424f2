"""Faults of the disk that last for a while: a full disk and a slow disk."""

from __future__ import annotations

import subprocess
import sys

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.faults import points
from pipeline.faults.plan import install
from pipeline.observe.status import read_all
from shm.arena import process_ticks
from starling.chaos.processes import NoTargetError


class FullDisk:
    """The kernel refuses every write to a file of the server (RLIMIT_FSIZE 0, EFBIG).

    Existing mappings stay usable. Writes of logs, journal, spilled pages, sessions, records and metrics fail. The fault
    also ends with this process, whatever ends that (disk_blocker.py).
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._blocker: subprocess.Popen[str] | None = None

    def begin(self) -> str:
        """Begin the fault and describe it. Raises `NoTargetError` if no process can be limited."""
        # Supervisors too: the stages that they start meanwhile inherit the limit.
        records = [record for record in read_all(paths.run_dir(self._config)) if record.alive]
        pids = {pid for record in records for pid in (*procfs.process_tree(record.pid), record.parent) if pid > 1}
        self._blocker = subprocess.Popen(
            [sys.executable, "-P", "-m", "starling.chaos.disk_blocker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
        assert self._blocker.stdin is not None
        assert self._blocker.stdout is not None
        print(*(f"{pid}:{process_ticks(pid)}" for pid in sorted(pids)), file=self._blocker.stdin, flush=True)
        count = int(self._blocker.stdout.readline() or 0)
        if not count:
            self.end()
            raise NoTargetError("the limits of no process can be changed")
        return f"disk full for {count} processes"

    def end(self) -> None:
        """Lift the limits."""
        if self._blocker is not None:
            self._blocker.communicate()
            self._blocker = None


class SlowDisk:
    """Delays every access to the server's files, through a fault plan that the running stages read."""

    POINTS = ("spill", "saved", "sessions", "spill_read", "saved_read", "journal_sync")

    def __init__(self, config: Config, delay_ms: int) -> None:
        self._path = paths.run_dir(config) / points.FILE
        self._delay_ms = delay_ms

    def begin(self) -> str:
        """Begin the fault and describe it."""
        install(self._path, ", ".join(f"disk:slow@{point}={self._delay_ms}" for point in self.POINTS))
        return f"disk slower by {self._delay_ms} ms per access"

    def end(self) -> None:
        """Remove the fault plan."""
        self._path.unlink(missing_ok=True)
