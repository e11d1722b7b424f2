"""A server and its kernels in turns: each finished step is computed once more while the server stands still."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.config.schema import ModelConfig
from shm import step_ring as sh
from shm.step_ring import Steps, StepsGeometry
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tests.e2e.server import poll_until
from tests.tools.watched_steps import watched_steps
from tools.bench.http.bound import computing_s
from tools.bench.http.step_watch import StepWatch
from tools.bench.http.turns import TURN_S, Replay, Turns
from tools.step_runner import Entry
from tools.tiny_gguf import SHAPES, write_model

COUNT = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 8) as count:
    while True:
        count[:] = (int.from_bytes(count[:], "little") + 1).to_bytes(8, "little")
"""


class Counting:
    """A process that counts as long as it runs."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        self.process = subprocess.Popen([sys.executable, "-c", COUNT, str(path)])
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
        poll_until(lambda: self.count)

    @property
    def count(self) -> int:
        return int.from_bytes(self._map[:], "little")

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._map.close()


class Recorded(Replay):
    """Keeps what was computed, and what another process has counted meanwhile."""

    def watch(self, other: Counting) -> None:
        self.other = other
        self.computed: list[Sequence[Entry]] = []
        self.counted: list[int] = []

    def run_s(self, steps: Sequence[Sequence[Entry]]) -> float:
        before = self.other.count
        seconds = super().run_s(steps)
        self.counted.append(self.other.count - before)
        self.computed += steps
        return seconds


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[tuple[StepWatch, Steps]]:
    geometry = StepsGeometry(max_rows=80, max_entries=2, max_samples=2, max_tokens=256, max_pages=8)
    with watched_steps(tmp_path, geometry) as both:
        yield both


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Counting]:
    process = Counting(tmp_path / "count")
    yield process
    process.end()


@pytest.fixture
def replay(tmp_path: Path, other: Counting) -> Iterator[Recorded]:
    model = ModelConfig(name="m", path=str(write_model(tmp_path / "m.gguf", SHAPES["small"], "Q4_0")))
    index = prepare_checkpoint(model, tmp_path / "models")
    cores = sorted(os.sched_getaffinity(0))[:1]
    with Recorded(index, tmp_path, cores, rows=2, tokens=200, samples=2) as kernels:
        kernels.watch(other)
        yield kernels


def finish(views: Steps, steps: Sequence[Sequence[Entry]]) -> None:
    """As if a server had computed these."""
    for step in steps:
        number = int(views.control[sh.DONE]) + 1
        slot = number % sh.SLOTS
        views.slot_head[slot, sh.SLOT_ENTRIES] = len(step)
        for place, entry in enumerate(step):
            views.entries[slot, place, :4] = entry
        views.control[sh.HEAD] = views.control[sh.DONE] = number


@pytest.mark.slow
def test_each_step_is_computed_once_more_while_the_server_stands_still(
    arena: tuple[StepWatch, Steps], other: Counting, replay: Recorded
) -> None:
    """Rows keep their sequences, whatever their numbers."""
    watch, views = arena
    affinity = os.sched_getaffinity(0)
    turns = Turns([other.process.pid], replay)
    begun = time.perf_counter()
    steps: list[list[Entry]] = [[(9, 0, 40, 1), (70, 0, 20, 0)], [(9, 40, 1, 1), (70, 20, 30, 1)]]
    steps += [[(9, 41 + i, 1, 1), (70, 50 + i, 1, 1)] for i in range(28)]
    for turn in range(4):
        finish(views, steps[8 * turn : 8 * turn + 8])
        turns.look(begun, watch)  # too early
        assert len(replay.computed) == min(8 * turn, 24)
        if turn < 3:
            turns.look(time.perf_counter() + TURN_S, watch)
            counted = other.count
            poll_until(lambda counted=counted: other.count > counted)  # it continues
    turns.finish(watch)
    assert replay.computed == steps
    assert replay.counted[:3] == [0, 0, 0]
    assert 0 < turns.stopped_s < time.perf_counter() - begun
    assert len(turns.spans) == 3 and turns.kernels_s > 0 and turns.cpu_s > 0
    assert os.sched_getaffinity(0) == affinity


@pytest.mark.slow
def test_more_rows_than_announced_are_refused(replay: Recorded) -> None:
    replay.run_s([[(1, 0, 8, 1), (2, 0, 8, 1)]])
    with pytest.raises(ValueError, match="3 rows, at most 2"):
        replay.run_s([[(3, 0, 8, 1)]])


def test_a_stop_within_a_step_is_no_computing() -> None:
    steps = [(0, 1_000_000_000), (1_000_000_000, 4_000_000_000), (5_000_000_000, 6_000_000_000)]
    assert computing_s(steps, []) == 5.0
    assert computing_s(steps, [(1.5, 3.5), (4.25, 4.75)]) == 3.0
