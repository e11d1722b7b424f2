"""Whether something disturbed a measurement: the host took cores, other programs ran, or the cores became slower.

    stolen     share of the cores that the host gave to another machine (/proc/stat), of hosts that report it
    others     share of the cores that other programs used
    slowdown   time of a fixed loop on each core, divided by the shortest ever seen: clock rate, and a host that
               reports no stolen time

A disturbed measurement of up to `LONGEST_S` is repeated up to `REPEATS` times, and the least disturbed one counts.  So
a figure that stays disturbed is still reported, and the report says how many did.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

REPEATS = 2
LONGEST_S = 60.0  # what takes longer is not repeated: the same disturbance is a smaller part of it, and runs take hours
STOLEN = 0.02  # shares and ratios above which a measurement counts as disturbed
OTHERS = 0.05
SLOWDOWN = 1.15
SPIN = 30_000  # turns of the fixed loop: about 2 ms
SPINS = 3  # the shortest of so many counts, so that an interrupt is no slowdown
CALIBRATION = 20  # loops on each core before the first measurement


class Ticks(NamedTuple):
    """Time of all cores since the start of the machine, in clock ticks."""

    total: int
    busy: int  # stolen time included
    stolen: int
    own: int  # of the processes that belong to the benchmark


class Signs(NamedTuple):
    """What was seen during one measurement."""

    stolen: float
    others: float
    slowdown: float

    @property
    def is_disturbed(self) -> bool:
        """Whether any sign is above its bound."""
        return self.excess > 1

    @property
    def excess(self) -> float:
        """The largest sign in units of its bound; up to 1 is undisturbed."""
        return max(self.stolen / STOLEN, self.others / OTHERS, (self.slowdown - 1) / (SLOWDOWN - 1))

    def __str__(self) -> str:
        return (
            f"stolen {100 * self.stolen:.0f} %, other programs {100 * self.others:.0f} %, cores {self.slowdown:.2f} "
            f"times slower"
        )


def read_ticks(pids: Sequence[int]) -> Ticks:
    """The counters now; processes that have ended count as 0."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    own = 0
    for pid in pids:
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        own += int(after_name[11]) + int(after_name[12])
    return Ticks(sum(fields), sum(fields) - fields[3] - fields[4], fields[7], own)


def spin(core: int) -> float:
    """Seconds of the fixed loop on one core, the shortest of `SPINS`. Only the calling thread moves there."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        best = float("inf")
        for _ in range(SPINS):
            begun = time.perf_counter()
            for _ in range(SPIN):
                pass
            best = min(best, time.perf_counter() - begun)
        return best
    finally:
        os.sched_setaffinity(0, allowed)


class Watch:
    """Repeats disturbed measurements. `repeated` and `disturbed`: how many were, and how many stayed so."""

    def __init__(
        self,
        pids: Sequence[int],
        cores: Sequence[int],
        read: Callable[[Sequence[int]], Ticks] = read_ticks,
        spin: Callable[[int], float] = spin,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pids`: the processes that are measured; this one is added. `clock`: s."""
        self._pids = (os.getpid(), *pids)
        self._cores = cores
        self._read = read
        self._spin = spin
        self._clock = clock
        self.repeated = self.disturbed = 0
        self.worst = Signs(0.0, 0.0, 1.0)  # of the measurements that count
        self._shortest = {core: min(spin(core) for _ in range(CALIBRATION)) for core in cores}

    def _slowdown(self) -> float:
        found = 1.0
        for core in self._cores:
            took = self._spin(core)
            self._shortest[core] = min(self._shortest[core], took)
            found = max(found, took / self._shortest[core])
        return found

    def observe(self, work: Callable[[], T]) -> tuple[T, Signs]:
        """Do `work` once: its result, and what was seen during it."""
        slowdown = self._slowdown()
        before = self._read(self._pids)
        result = work()
        after = self._read(self._pids)
        total, busy, stolen, own = (b - a for a, b in zip(before, after, strict=True))
        others = max(0, busy - stolen - own) / max(1, total)
        return result, Signs(stolen / max(1, total), others, max(slowdown, self._slowdown()))

    def undisturbed(self, work: Callable[[], T]) -> T:
        """Do `work`, again while it is disturbed; the result of the least disturbed time."""
        begun = self._clock()
        result, signs = self.observe(work)
        is_long = self._clock() - begun > LONGEST_S
        for _ in range(0 if is_long else REPEATS):
            if not signs.is_disturbed:
                break
            self.repeated += 1
            again, seen = self.observe(work)
            if seen.excess < signs.excess:
                result, signs = again, seen
        self.disturbed += signs.is_disturbed
        if signs.excess > self.worst.excess:
            self.worst = signs
        return result

    def plain(self) -> dict[str, object]:
        """The fields for the report."""
        return {"repeated": self.repeated, "disturbed": self.disturbed, "worst": str(self.worst)}
