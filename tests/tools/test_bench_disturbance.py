"""The benchmark repeats measurements that were disturbed, and only those."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tools.bench.disturbance import LONGEST_S, REPEATS, Signs, Ticks, Watch, read_ticks, spin


class Machine:
    """Counters of one core that a test moves; `slow` is the time of a spin."""

    def __init__(self) -> None:
        self.ticks = Ticks(0, 0, 0, 0)
        self.slow = 1.0

    def read(self, pids: Sequence[int]) -> Ticks:
        return self.ticks

    def spin(self, core: int) -> float:
        return self.slow

    def run(self, total: int, own: int, stolen: int = 0, others: int = 0) -> None:
        """Pass time of which `own`, `stolen` and `others` ticks were busy."""
        t = self.ticks
        self.ticks = Ticks(t.total + total, t.busy + own + stolen + others, t.stolen + stolen, t.own + own)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def watch(machine: Machine) -> Watch:
    return Watch([], [0], machine.read, machine.spin)


def test_a_quiet_measurement_is_done_once(machine: Machine, watch: Watch) -> None:
    done: list[int] = []

    def work() -> int:
        machine.run(100, own=90)
        done.append(len(done))
        return done[-1]

    assert watch.undisturbed(work) == 0
    assert (done, watch.repeated, watch.disturbed) == ([0], 0, 0)


@pytest.mark.parametrize("sign", ["stolen", "others"])
def test_a_disturbed_measurement_is_repeated(machine: Machine, watch: Watch, sign: str) -> None:
    disturbances = [40, 0]
    values = iter("ab")

    def work() -> str:
        machine.run(100, own=50, **{sign: disturbances.pop(0)})
        return next(values)

    assert watch.undisturbed(work) == "b"
    assert (watch.repeated, watch.disturbed) == (1, 0)


def test_slower_cores_disturb(machine: Machine, watch: Watch) -> None:
    """Their host reports no stolen time: only the fixed loop, before and after the work, shows it."""
    speeds = [1.5, 1.0, 1.0]  # after each time; the second time begins with slow cores

    def work() -> int:
        machine.slow = speeds.pop(0)
        machine.run(100, own=90)
        return len(speeds)

    assert watch.undisturbed(work) == 0
    assert (watch.repeated, watch.disturbed) == (2, 0)


def test_the_least_disturbed_result_counts_when_the_machine_stays_disturbed(machine: Machine, watch: Watch) -> None:
    disturbances = [30, 10, 20]
    assert len(disturbances) == REPEATS + 1

    def work() -> int:
        others = disturbances.pop(0)
        machine.run(100, own=50, others=others)
        return others

    assert watch.undisturbed(work) == 10
    assert (watch.repeated, watch.disturbed) == (REPEATS, 1)
    assert watch.worst == Signs(0.0, 0.1, 1.0)
    assert "other programs 10 %" in watch.plain()["worst"]


@pytest.mark.parametrize(("took_s", "times"), [(LONGEST_S, REPEATS + 1), (LONGEST_S + 1, 1)])
def test_what_takes_long_is_not_repeated(machine: Machine, took_s: float, times: int) -> None:
    now = [0.0]
    watch = Watch([], [0], machine.read, machine.spin, lambda: now[0])
    done = list[int]()

    def work() -> None:
        machine.run(100, own=50, others=30)
        now[0] += took_s
        done.append(1)

    watch.undisturbed(work)
    assert (len(done), watch.disturbed) == (times, 1)


def test_the_real_counters_see_another_program() -> None:
    """A process that computes counts as another program until it is one of the benchmark's own."""
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()

        def until_used() -> None:
            begun = read_ticks([busy.pid]).own
            while read_ticks([busy.pid]).own < begun + 20:
                os.sched_yield()

        read: list[Ticks] = []

        def reading(pids: Sequence[int]) -> Ticks:
            read.append(read_ticks(pids))
            return read[-1]

        # One inside the other, so that both see what else runs on the machine.
        without = Watch([], [0], reading, lambda core: 1.0)
        counting = Watch([busy.pid], [0], reading, lambda core: 1.0)
        (_, own), other = without.observe(lambda: counting.observe(until_used))
        assert (other.others - own.others) * (read[-1].total - read[0].total) > 10
    finally:
        busy.kill()
        busy.wait()
        assert busy.stdout is not None
        busy.stdout.close()


def test_a_process_that_has_ended_uses_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert read_ticks([ended.pid]).own == 0


def test_the_affinity_is_restored_after_a_spin() -> None:
    before = os.sched_getaffinity(0)
    assert spin(max(before)) > 0
    assert os.sched_getaffinity(0) == before
