"""The benchmark's time that ranks waited for a taken core: what a disturbance of a known size adds to it.

Two processes on one core use real CPU time: one always, as a rank, the other a twentieth of that in bursts, as a
program beside the run.  What is compared are accounts of the kernel: other work of the machine lengthens the rank's
waits by what it takes of the core, which the core's own account has.  The clock only shows whether something kept the
rank from being runnable (a frozen control group, a host that took the core): such a measurement is repeated.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tools.bench.http.server_under_test import exact_cpu_s

pytestmark = pytest.mark.slow

CPU_S, PAUSE_S, SHARE = 4.0, 0.1, 0.05  # of a rank in each measurement; between bursts; of the disturbance
TOLERANCE_S = CPU_S * SHARE / 4  # the core's account counts ticks of 10 ms
WAIT_S = 300.0
MEASUREMENTS = 5  # until one in which the rank was always runnable
# For each line that it reads: computes for so many seconds of CPU time, and prints its accounts and its core's. It
# sleeps before it reads them, because a wait and a tick are counted when they end.
RANK = """
import json, os, sys, time
from pathlib import Path
from tools.bench.http.server_under_test import core_wait_s, exact_cpu_s
core, disturbance = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})

def read():
    time.sleep(0.001)
    (line,) = [one for one in Path("/proc/stat").read_text().splitlines() if one.startswith(f"cpu{core} ")]
    user, nice, system, _, _, *interrupts_and_stolen = map(int, line.split()[1:9])
    busy = (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK")
    return [time.monotonic(), core_wait_s(os.getpid()), exact_cpu_s(os.getpid()), exact_cpu_s(disturbance), busy]

for line in sys.stdin:
    until = exact_cpu_s(os.getpid()) + float(line)
    before = read()
    while exact_cpu_s(os.getpid()) < until:
        for _ in range(20_000):
            pass
    print(json.dumps([now - then for now, then in zip(read(), before)]), flush=True)
"""
# Until its input ends: a burst of CPU time, then a pause until the rank has computed for the rest of the share.
DISTURBANCE = f"""
import os, select, sys, time
from tools.bench.http.server_under_test import exact_cpu_s
os.sched_setaffinity(0, {{int(sys.argv[1])}})
print("ready", flush=True)
rank = int(sys.stdin.readline())
begun, rank_begun = time.thread_time(), exact_cpu_s(rank)
while not select.select([sys.stdin], [], [], {PAUSE_S})[0]:
    while time.thread_time() - begun < {SHARE} * (exact_cpu_s(rank) - rank_begun):
        pass
"""


class Accounts(NamedTuple):
    """Seconds in a measurement."""

    elapsed: float
    waited: float  # the benchmark's figure
    rank: float
    disturbance: float
    core: float  # all time in which it was not idle

    @property
    def others(self) -> float:
        """What the core computed for neither of the two."""
        return self.core - self.rank - self.disturbance

    @property
    def not_runnable(self) -> float:
        return self.elapsed - self.rank - self.waited


@pytest.fixture
def core() -> int:
    return max(os.sched_getaffinity(0))


def start(program: str, *arguments: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def send(process: subprocess.Popen[str], value: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{value}\n")
    process.stdin.flush()


@pytest.fixture
def pair(core: int) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    with ExitStack() as stack:
        disturbance = stack.enter_context(start(DISTURBANCE, core))
        stack.callback(disturbance.kill)
        rank = stack.enter_context(start(RANK, core, disturbance.pid))
        stack.callback(rank.kill)
        assert line_of(disturbance) == "ready\n"
        yield rank, disturbance


def measure(rank: subprocess.Popen[str]) -> Accounts:
    for _ in range(MEASUREMENTS):
        send(rank, CPU_S)
        found = Accounts(*json.loads(line_of(rank)))
        if found.not_runnable < TOLERANCE_S / 2:
            return found
    pytest.skip(f"the rank could not run all the time: {found}")


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], WAIT_S)[0]
    return process.stdout.readline()


def test_a_process_with_a_twentieth_of_a_core_adds_that_to_the_wait(
    pair: tuple[subprocess.Popen[str], subprocess.Popen[str]],
) -> None:
    rank, disturbance = pair
    client_s = exact_cpu_s(os.getpid())
    alone = measure(rank)
    send(disturbance, rank.pid)
    beside = measure(rank)
    client_s = exact_cpu_s(os.getpid()) - client_s
    assert alone.disturbance < 0.1 * CPU_S * SHARE, alone
    assert beside.disturbance == pytest.approx(CPU_S * SHARE, rel=0.2), beside
    assert beside.waited >= beside.disturbance - 0.002, "what the disturbance computed, the rank waited"
    assert alone.waited == pytest.approx(alone.others, abs=TOLERANCE_S), alone
    assert beside.waited - beside.others == pytest.approx(CPU_S * SHARE, abs=TOLERANCE_S), beside
    # Neither the rank's own work nor this process's, the client, is part of it.
    assert beside.rank == pytest.approx(alone.rank, rel=0.05)
    assert client_s < TOLERANCE_S
