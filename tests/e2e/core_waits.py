"""How long processes waited for a CPU core, so that a test can tell a starved process from one that hangs.

The kernel counts, for each thread, the time in which it was runnable and had no core (the run-queue delay, field 2 of
/proc/PID/schedstat, ns). It adds a wait when the wait ends: read the counter once the process has run again.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from pipeline.observe.status import read_all
from pipeline.procfs import children, exists, threads
from pipeline.runtime.timer_coalescing import ALIGN_S
from stages.scheduler.core.version_runner import STALLED_S

ROUNDING_S = 0.05  # /ready reports tenths of a second


def run_queue_delay_s(pid: int, thread: int | None = None) -> float:
    """Seconds that a thread of `pid` (default: the main thread) has waited for a core; 0.0 if that is unknown."""
    try:
        return int(Path(f"/proc/{pid}/task/{thread or pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def own_run_queue_delay_s() -> float:
    """The same for the main thread of this process."""
    return run_queue_delay_s(os.getpid())


class CoreWaits:
    """Run-queue delays of every stage and rank of a server, sampled over time."""

    def __init__(self, run_dir: Path) -> None:
        self._pids: dict[str, int] = {}
        for record in read_all(run_dir):
            if record.alive:
                self._pids[record.stage] = record.pid
            if record.alive and record.stage.startswith("worker"):
                for rank, pid in enumerate(children(record.pid), 1):
                    self._pids[f"{record.stage}/{rank}"] = pid
        self._samples: list[tuple[float, dict[tuple[str, int], float]]] = []
        self.sample()

    def sample(self) -> None:
        """Read all counters. Call it often, and once more after every stage has run again."""
        delays = {
            (name, thread): run_queue_delay_s(pid, thread)
            for name, pid in self._pids.items()
            for thread in (threads(pid) if exists(pid) else ())
        }
        self._samples.append((time.monotonic(), delays))

    def waited_s(self, name: str, since: float, until: float) -> float:
        """The longest wait for a core among the threads of a process, between two times of the monotonic clock."""
        before = next((delays for at, delays in reversed(self._samples) if at <= since), self._samples[0][1])
        after = next((delays for at, delays in self._samples if at >= until), self._samples[-1][1])
        waits = [delay - before.get(key, 0.0) for key, delay in after.items() if key[0] == name]
        return max(waits, default=0.0)

    def explain(self, reason: str, at: float) -> bool:
        """Was the reason that /ready gave at the time `at` only a wait for a core?

        - "STAGE: silent for N s": a stage sends a heartbeat at least every `ALIGN_S`. The silence beyond that must be
          time in which the stage could not send, or the gateway could not receive, because it had no core.
        - a worker with a step that "does not compute": in the last `STALLED_S` a rank used no CPU time. For all of that
          time but one heartbeat, one of the ranks must have waited for a core.
        """
        if found := re.fullmatch(r"(\S+): silent for (\d+\.\d) s", reason):
            silence_s = float(found[2])
            since, until = at - silence_s - ALIGN_S, at + ALIGN_S
            waited_s = sum(self.waited_s(name, since, until) for name in (found[1], "gateway"))
            return waited_s >= silence_s - ALIGN_S - ROUNDING_S
        if reason.endswith("its worker has a step and does not compute"):
            since, until = at - STALLED_S - ALIGN_S, at + ALIGN_S
            ranks = [name for name in self._pids if name.startswith("worker")]
            return max((self.waited_s(rank, since, until) for rank in ranks), default=0.0) >= STALLED_S - ROUNDING_S
        return False
