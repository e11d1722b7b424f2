"""Which requests the steps of a worker computed, as log lines of level debug.

A line is about the steps that were acknowledged within `LINE_S`, as the worker's line `steps are computed` is, and has
the numbers of the same ring: `model`, `generation` and a step find one by the other.  The worker itself computes rows,
and does not know whose they are.
"""

from __future__ import annotations

import json
import logging

from pipeline.observe.log_names import log_names
from stages.scheduler.core.step import Step

log = logging.getLogger("starling.scheduler")

LINE_S = 0.05  # steps in one line; the worker logs as often
MAX_REQUESTS = 32  # named in a line; others are counted
MAX_NAMES_BYTES = 12_288  # of all of them, as JSON: a line of more than logs.MAX_LINE_BYTES would be cut


class StepLog:
    """Of one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._began = 0.0
        self._steps: dict[str, int | float] = {}  # empty: none since the last line
        self._requests: dict[str, dict[str, str | None]] = {}  # by id

    @property
    def is_enabled(self) -> bool:
        """Whether lines of this level are logged."""
        return log.isEnabledFor(logging.DEBUG)

    def add(self, step: Step, generation: int, took_us: float, worker_pid: int, now: float) -> None:
        """An acknowledged step. Steps come in order; their sequences may have ended."""
        if self._steps and (self._steps["generation"] != generation or now >= self._began + LINE_S):
            self.flush()
        if not self._steps:
            self._began = now
            self._steps = {"generation": generation, "first": step.number, "worker_pid": worker_pid, "duration_ms": 0.0}
        self._steps["last"] = step.number
        self._steps["duration_ms"] += took_us / 1000
        for entry in step.entries:
            one = entry.sequence
            if one.request not in self._requests:
                names = log_names(one.request, "", one.tenant.name, one.session)
                del names["model"]  # that of the line
                self._requests[one.request] = names

    def flush(self) -> None:
        """Log the steps since the last line, if there are any."""
        steps, self._steps = self._steps, {}
        requests, self._requests = self._requests, {}
        if not steps:
            return
        steps["duration_ms"] = round(steps["duration_ms"], 3)
        named: list[dict[str, str | None]] = []
        n_bytes = 0
        for names in requests.values():
            n_bytes += len(json.dumps(names, ensure_ascii=False).encode("utf-8", "replace"))
            if len(named) == MAX_REQUESTS or n_bytes > MAX_NAMES_BYTES:
                break
            named.append(names)
        facts = {"model": self._model, **steps, "n_requests": len(requests), "requested_by": named}
        log.debug("requests of steps", extra=facts)
