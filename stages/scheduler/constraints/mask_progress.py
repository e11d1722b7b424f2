"""Whether the mask process makes progress, or hangs and must be killed.

A kill throws away all compiled grammars, of every tenant.  So time that passes is no reason for one: constraints of
others, which passed their trials, may be compiled first, and the machine may be busy.  The process says when each
compilation begins and ends; in between it makes progress while it uses CPU time, up to a bound.  Pure.
"""

from __future__ import annotations

import math

from stages.scheduler.constraints.frames import Compiled, Compiling
from stages.scheduler.constraints.vetting import MAX_DELAY

STUCK_S = 30.0  # that the process owes a mask without CPU time: it hangs. Also added to the bounds below
# CPU time for one compilation or mask, in trial limits.  A constraint that has passed took at most one; masks of other
# sequences, which the process computes meanwhile, and noise are the rest.
MAX_CPU_LIMITS = 3


class MaskProgress:
    """What one mask process after the other does."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: most CPU time of a trial."""
        self._max_cpu_s = MAX_CPU_LIMITS * limit_s + STUCK_S
        self._max_s = MAX_DELAY * limit_s + STUCK_S
        self.restart()

    def restart(self) -> None:
        """The process has ended."""
        self.compiling = ""  # the sequence whose constraint is being compiled
        self._compilation = 0  # its number; 0: none
        self._changed_at = -math.inf  # s; when a compilation began or ended last
        self._cpu_s, self._cpu_at = 0.0, -math.inf  # CPU time of the process, and when it was seen to grow last
        self._begun_at, self._begun_cpu_s = -math.inf, 0.0  # of what it does now

    def on_compiling(self, frame: Compiling, now: float) -> None:
        """A compilation begins."""
        self.compiling, self._compilation, self._changed_at = frame.sequence, frame.id, now

    def on_compiled(self, frame: Compiled, now: float) -> None:
        """One has ended; the next one may have begun."""
        self._changed_at = now
        if frame.id == self._compilation:
            self.compiling, self._compilation = "", 0

    def is_stuck(self, owed_since: float, now: float, cpu_s: float) -> bool:
        """The process hangs. `owed_since`: when the oldest mask that is not there was asked for.

        cpu_s: CPU time of the process so far.
        """
        if cpu_s > self._cpu_s:
            self._cpu_s, self._cpu_at = cpu_s, now
        begun_at = self._changed_at if self._compilation else max(owed_since, self._changed_at)
        if begun_at != self._begun_at:
            self._begun_at, self._begun_cpu_s = begun_at, cpu_s
        return (
            now - max(begun_at, self._cpu_at) > STUCK_S
            or cpu_s - self._begun_cpu_s > self._max_cpu_s
            or now - begun_at > self._max_s
        )
