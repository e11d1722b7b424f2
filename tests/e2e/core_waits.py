"""How long processes waited for a CPU core, so that a test can tell a starved process from one that hangs.

The kernel counts, for each thread, the time in which it was runnable and had no core (the run-queue delay, field 2 of
/proc/PID/schedstat, ns). It adds a wait when the wait ends: read the counter once the process has run again. On a
virtual machine the host can take a core from a thread that runs on it. The kernel counts that as stolen time of the
core (/proc/stat), and of some hosts not at all, so a `Sleeper` measures it: a thread that only sleeps, and is late.
"""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

from pipeline.observe.status import read_all
from pipeline.procfs import children, exists, threads
from pipeline.runtime.timer_coalescing import ALIGN_S
from stages.gateway.admission.stage_health import STUCK_S
from stages.scheduler.core.version_runner import STALLED_S

INTERVAL_S = ALIGN_S * 9 / 8  # aligned moments, of which the first may be used early by an eighth
PROGRESS_S = STUCK_S / 2  # work that has its cores makes progress as often, with a margin
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


def stolen_s() -> float:
    """Seconds that the host has taken from the cores of this machine, summed over the cores."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(line[8]) / os.sysconf("SC_CLK_TCK")


class Sleeper:
    """A thread that sleeps for `NAP_S` again and again, and records by how much each sleep was too long."""

    NAP_S = 0.01

    def __init__(self) -> None:
        self._over = threading.Event()
        self._late: list[tuple[float, float]] = []  # (end of the sleep, s too late)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(self.NAP_S):
            now = time.monotonic()
            if now - before > 2 * self.NAP_S:
                self._late.append((now, now - before - self.NAP_S))
            before = now

    def late_s(self, since: float, until: float) -> float:
        """The longest delay of a sleep that ended between two times of the monotonic clock."""
        return max((late for at, late in self._late if since <= at <= until), default=0.0)

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()


class CoreWaits:
    """Run-queue delays of every stage and rank of a server, and stolen time, sampled over time."""

    def __init__(self, run_dir: Path) -> None:
        self._pids: dict[str, int] = {}
        for record in read_all(run_dir):
            if record.alive:
                self._pids[record.stage] = record.pid
            if record.alive and record.stage.startswith("worker"):
                for rank, pid in enumerate(children(record.pid), 1):
                    self._pids[f"{record.stage}/{rank}"] = pid
        self._samples: list[tuple[float, dict[tuple[str, int], float]]] = []
        self._stolen: list[tuple[float, float]] = []
        self._sleeper = Sleeper()
        self.sample()

    def sample(self) -> None:
        """Read all counters. Call it often, and once more after every stage has run again."""
        delays = {
            (name, thread): run_queue_delay_s(pid, thread)
            for name, pid in self._pids.items()
            for thread in (threads(pid) if exists(pid) else ())
        }
        self._samples.append((time.monotonic(), delays))
        self._stolen.append((time.monotonic(), stolen_s()))

    def stop(self) -> None:
        """End the measurement of this process's own delays."""
        self._sleeper.stop()

    def machine_waited_s(self, since: float, until: float) -> float:
        """Time in which the machine did not run, between two times: stolen by the host, or a sleep that ended late."""
        before = next((stolen for at, stolen in reversed(self._stolen) if at <= since), self._stolen[0][1])
        after = next((stolen for at, stolen in self._stolen if at >= until), self._stolen[-1][1])
        return max(after - before, self._sleeper.late_s(since, until))

    def waited_s(self, name: str, since: float, until: float) -> float:
        """The longest wait for a core among the threads of a process, between two times of the monotonic clock."""
        before = next((delays for at, delays in reversed(self._samples) if at <= since), self._samples[0][1])
        after = next((delays for at, delays in self._samples if at >= until), self._samples[-1][1])
        waits = [delay - before.get(key, 0.0) for key, delay in after.items() if key[0] == name]
        return max(waits, default=0.0)

    def explain(self, reason: str, at: float) -> bool:
        """Was the reason that /ready gave at the time `at` only a wait for a core?

        - "STAGE: silent for N s": a stage sends a heartbeat at least every `INTERVAL_S`. The silence beyond it must be
          time in which the stage could not send, or the gateway could not receive, because it had no core.
        - "STAGE: has work and has made no progress for N s": with a core, work makes progress within `PROGRESS_S`. The
          rest must be time in which the stage, the gateway or a rank whose step the stage waits for had no core.
        - a worker with a step that "does not compute": in the last `STALLED_S` a rank used no CPU time. For all of that
          time but one heartbeat, one of the ranks must have waited for a core.
        """
        if found := re.fullmatch(r"(\S+): silent for (\d+\.\d) s", reason):
            silence_s = float(found[2])
            since, until = at - silence_s - ALIGN_S, at + ALIGN_S
            waited_s = sum(self.waited_s(name, since, until) for name in (found[1], "gateway"))
            return max(waited_s, self.machine_waited_s(since, until)) >= silence_s - INTERVAL_S - ROUNDING_S
        ranks = [name for name in self._pids if name.startswith("worker")]
        if found := re.fullmatch(r"(\S+): has work and has made no progress for (\d+\.\d) s", reason):
            stuck_s = float(found[2])
            since, until = at - stuck_s - ALIGN_S, at + ALIGN_S
            waited_s = sum(self.waited_s(name, since, until) for name in (found[1], "gateway"))
            waited_s += max((self.waited_s(rank, since, until) for rank in ranks), default=0.0)
            return max(waited_s, self.machine_waited_s(since, until)) >= stuck_s - PROGRESS_S - ROUNDING_S
        if reason.endswith("its worker has a step and does not compute"):
            since, until = at - STALLED_S - ALIGN_S, at + ALIGN_S
            waited_s = max((self.waited_s(rank, since, until) for rank in ranks), default=0.0)
            waited_s += self.waited_s("scheduler", since, until)
            return max(waited_s, self.machine_waited_s(since, until)) >= STALLED_S - ROUNDING_S
        return False
