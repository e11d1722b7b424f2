"""The steps of a running server, read from its steps arena: their entries, their times and the pauses between them."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig, ServerConfig
from shm import step_ring as sh
from shm.step_ring import attach_steps
from starling.bench.figures import percentile
from tools.bench.http.server_under_test import ServerUnderTest

LOOK_S = 0.005  # between two looks at the steps, unless so many have finished meanwhile:
LOOK_STEPS = sh.SLOTS // 4  # with up to SLOTS / 2 published steps, and some that finish before the next look


class StepWatch:
    """Reads the times of steps from the steps arena. Call `look` at least once in eight steps."""

    def __init__(self, server: ServerUnderTest) -> None:
        config = Config(server=ServerConfig(run_dir=str(server.run_dir)), models=(ModelConfig(name=server.model),))
        path = paths.arena_dir(config) / f"{config.models[0].slug}.steps"
        self._arena, self._steps, _ = attach_steps(Path(path))
        self._last = int(self._steps.control[sh.DONE])
        self._looked_at = 0.0
        self._before = (0, 0, 0)  # step, entries, end
        self.pauses: list[tuple[int, float]] = []  # entries of a step, us between its predecessor's end and its begin
        self.steps: list[tuple[int, int, float]] = []  # tokens, attention positions, us
        self.periods: list[tuple[int, float]] = []  # entries of a step, us between its predecessor's end and its own
        self.spans: list[tuple[int, int]] = []  # begin and end of the steps, ns of the monotonic clock
        self.entries: list[list[tuple[int, int, int, int]]] = []  # of the steps: row, start, count, samples
        self.missed = 0

    def look_sometimes(self, now: float) -> None:
        """`look`, if the last one was `LOOK_S` or `LOOK_STEPS` ago: data for many clients arrives at once.

        Looking takes CPU time.  `now`: seconds.
        """
        if now - self._looked_at >= LOOK_S or int(self._steps.control[sh.DONE]) - self._last >= LOOK_STEPS:
            self._looked_at = now
            self.look()

    def look(self) -> None:
        """Take in the steps that have finished since the last call."""
        steps = self._steps
        done = int(steps.control[sh.DONE])
        for number in range(self._last + 1, done + 1):
            if int(steps.control[sh.HEAD]) - number >= sh.SLOTS:  # a later step has overwritten its slot
                self.missed += 1
                continue
            slot = number % sh.SLOTS
            _, begun, ended, _ = steps.timing[slot].tolist()
            entries = int(steps.slot_head[slot, sh.SLOT_ENTRIES])
            self.entries.append([tuple(one) for one in steps.entries[slot, :entries, : sh.SAMPLES + 1].tolist()])
            parts = [(start, count) for _, start, count, _ in self.entries[-1]]
            tokens = sum(count for _, count in parts)
            positions = sum(count * start + count * (count + 1) // 2 for start, count in parts)
            self.steps.append((tokens, positions, (ended - begun) / 1e3))
            self.spans.append((begun, ended))
            before, n, end = self._before
            if before == number - 1 and n == entries:
                self.pauses.append((entries, (begun - end) / 1e3))
                self.periods.append((entries, (ended - end) / 1e3))
            self._before = (number, entries, ended)
        self._last = done

    def figures(self, entries: int) -> dict[str, float]:
        """Pauses between two steps of `entries` sequences each, microseconds."""
        found = [us for n, us in self.pauses if n == entries]
        return {
            "steps": len(found),
            "p50_us": round(percentile(found, 0.5), 1),
            "p95_us": round(percentile(found, 0.95), 1),
            "p99_us": round(percentile(found, 0.99), 1),
        }

    def period_us(self, entries: int, quantile: float = 0.25) -> float:
        """Time from step to step of `entries` sequences each, microseconds; 0.0 if there were none."""
        found = [us for n, us in self.periods if n == entries]
        return percentile(found, quantile) if found else 0.0

    def close(self) -> None:
        """Unmap the arena."""
        self._arena.close()
