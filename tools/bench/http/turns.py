"""A server and its kernels alone in turns of 0.8 s, within one run: the speed of cores changes too often for two runs.

All processes of the server are stopped, the steps that it has finished since the last turn are computed once more by
the kernels in this process, on the cores that the ranks have, and the server continues.  Its clients wait meanwhile,
and the time of these waits counts for neither side.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from shm import step_ring as sh
from tools.bench.http.step_watch import StepWatch
from tools.bench.offline.candidate import Candidate
from tools.step_runner import Entry

AT_ONCE = sh.SLOTS // 2  # steps that are published together
TURN_S = 0.8  # short beside the seconds for which a core keeps its speed, long beside what a stop costs
STOPPED_S = 5.0


class Replay:
    """The kernels without a server, for steps of at most `rows` sequences of `tokens` positions. A context manager."""

    def __init__(self, index: Path, directory: Path, cores: list[int], rows: int, tokens: int, samples: int) -> None:
        """`samples`: most of a step. While no steps are computed, this thread may run where it could before."""
        self._core, self._places, self._rows = cores[0], dict[int, int](), rows
        self._affinity = os.sched_getaffinity(0)
        self._candidate = Candidate(index, directory, cores, rows, tokens, samples=samples)
        os.sched_setaffinity(0, self._affinity)
        self._candidate.fill_cache()
        self._candidate.fill_tokens(rows, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._candidate.__exit__(kind, value, trace)

    def run_s(self, steps: Sequence[Sequence[Entry]]) -> float:
        """Seconds that the kernels take for these steps. Rows of any numbers keep their sequences between calls.

        The first step is computed once more before, without being counted: the kernels have not run for a while.
        `ValueError` if the steps have had more rows in all than this was made for.
        """
        if not steps:
            return 0.0
        for row in (row for step in steps for row, *_ in step):
            self._places.setdefault(row, len(self._places))
        if len(self._places) > self._rows:
            raise ValueError(f"the steps have {len(self._places)} rows, at most {self._rows} were announced")
        again = [[(self._places[row], start, count, n) for row, start, count, n in step] for step in steps]
        os.sched_setaffinity(0, {self._core})  # this thread is rank 0
        try:
            self._candidate.runner.run_all(again[:1])
            begun = self._candidate.clock()
            for at in range(0, len(again), AT_ONCE):
                self._candidate.runner.run_all(again[at : at + AT_ONCE])
            return self._candidate.clock() - begun
        finally:
            os.sched_setaffinity(0, self._affinity)


class Turns:
    """Call `look` often while the server is under load, and `finish` at the end."""

    def __init__(self, pids: Sequence[int], replay: Replay) -> None:
        """`pids`: all processes of the server, parents before their children.

        A supervisor kills a stage that it finds stopped, so it is stopped before its stage and continues after it.
        """
        self._pids = list(pids)
        self._replay = replay
        self._since = time.perf_counter()
        self._computed = 0  # steps of the watch that have been computed once more
        self.kernels_s = 0.0  # time of the kernels alone for the same steps
        self.spans: list[tuple[float, float]] = []  # time.perf_counter() from stop to continuation
        self.cpu_s = 0.0  # CPU time of this process in these

    @property
    def stopped_s(self) -> float:
        """The time for which the server was stopped."""
        return sum(end - begin for begin, end in self.spans)

    def look(self, now: float, watch: StepWatch) -> None:
        """The kernels' turn, if the server's has taken `TURN_S`. `now`: time.perf_counter()."""
        if now - self._since >= TURN_S:
            self._stop(watch)
            self._since = time.perf_counter()

    def _stop(self, watch: StepWatch) -> None:
        begun, cpu = time.perf_counter(), time.process_time()
        try:
            for pid in self._pids:
                os.kill(pid, signal.SIGSTOP)
                _wait_stopped(pid)
            self.finish(watch)
        finally:
            for pid in reversed(self._pids):
                with contextlib.suppress(ProcessLookupError):  # the others must continue
                    os.kill(pid, signal.SIGCONT)
            self.cpu_s += time.process_time() - cpu
            self.spans.append((begun, time.perf_counter()))

    def finish(self, watch: StepWatch) -> None:
        """Compute once more what the server has computed since the last turn. It must not compute now."""
        watch.look()
        steps = watch.entries[self._computed :]
        self._computed = len(watch.entries)
        self.kernels_s += self._replay.run_s(steps)


def _wait_stopped(pid: int) -> None:
    """Until all threads of a process are stopped. `TimeoutError` after `STOPPED_S`."""
    end = time.perf_counter() + STOPPED_S
    for task in Path(f"/proc/{pid}/task").iterdir():
        while _state(task) not in "TtZX":
            if time.perf_counter() > end:
                raise TimeoutError(f"process {pid} has not stopped within {STOPPED_S:g} s")


def _state(task: Path) -> str:
    """A thread's state, proc_pid_stat(5); "X" if it has ended meanwhile."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
