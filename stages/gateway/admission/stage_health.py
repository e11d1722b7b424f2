"""The health of the other stages, from their heartbeats. Pure; the clock is injected.

A heartbeat carries ready, busy, a reason and a progress counter.  The gateway receives those of the tokenizer, the
scheduler and the KV manager; the scheduler's model states cover the workers.  Long work that makes progress does not
make a stage unready.  A stage that is busy without progress, or silent, is unready; both are detected within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.protocol.messages import Heartbeat, ModelState
from pipeline.runtime import timer_coalescing

STUCK_S = 0.6  # busy without progress for longer: not ready
SILENT_S = 0.7  # no heartbeat for longer: not ready. The connection is closed later, because that loses work
QUIET_S = 0.2  # added for an idle stage, whose ticks are coalesced
CHECK_S = timer_coalescing.ALIGN_S + 0.1  # longest time between two calls of `observe` in a gateway that runs
SILENT_BEATS = 3  # missing heartbeats that make a stage unready, for a long heartbeat interval


class StageHealth:
    """The health of one stage."""

    def __init__(self, stage: str, clock: Callable[[], float], heartbeat_s: float = 0.25) -> None:
        self.stage = stage
        self._clock = clock
        self._stuck_s = max(STUCK_S, SILENT_BEATS * heartbeat_s - 0.15)
        self._silent_s = max(SILENT_S, SILENT_BEATS * heartbeat_s)
        self._heartbeat: Heartbeat | None = None
        self._checked_at = self._received_at = clock()
        self._progressed_at = clock()
        self._is_up = False
        self._was_up = False

    def up(self) -> None:
        """A process of the stage has connected."""
        self._is_up = self._was_up = True
        self._heartbeat = None
        self._progressed_at = self._received_at = self._checked_at = self._clock()

    def down(self) -> None:
        """The process has disconnected."""
        self._is_up = False
        self._heartbeat = None

    def observe(self, heartbeat: Heartbeat | None) -> None:
        """Take the last heartbeat received, None if there is none yet. Call when one arrives, and every `CHECK_S`."""
        now = self._clock()
        lost = self._suspended_s(now)
        self._received_at += lost
        self._progressed_at += lost
        self._checked_at = now
        last = self._heartbeat
        if heartbeat is None or heartbeat is last:
            return
        self._received_at = now
        is_progress = last is None or (heartbeat.epoch, heartbeat.progress) != (last.epoch, last.progress)
        if is_progress or not heartbeat.busy:
            self._progressed_at = now
        self._heartbeat = heartbeat

    def _suspended_s(self, now: float) -> float:
        """Time since the last check in which the gateway was suspended: it could not receive heartbeats. In s."""
        return max(0.0, now - self._checked_at - CHECK_S)

    @property
    def is_up(self) -> bool:
        """True while a process of the stage is connected."""
        return self._is_up

    @property
    def problem(self) -> str:
        """Why the stage is not ready; "" if it is."""
        if not self._is_up:
            return "not running" if self._was_up else "not started yet"
        heartbeat = self._heartbeat
        if heartbeat is None:
            return "no heartbeat yet"
        if not heartbeat.ready:
            return heartbeat.reason or "not ready"
        now = self._clock()
        lost = self._suspended_s(now)  # a request can be handled before the heartbeats that came meanwhile
        silent_s = now - (self._received_at + lost)
        if silent_s > self._silent_s + (QUIET_S if heartbeat.idle else 0.0):
            return f"silent for {silent_s:.1f} s"
        stuck_s = now - (self._progressed_at + lost)
        if heartbeat.busy and stuck_s > self._stuck_s:
            return f"has work and has made no progress for {stuck_s:.1f} s"
        return ""

    def report(self) -> dict[str, Any]:
        """Return the fields of the stage in /ready."""
        heartbeat = self._heartbeat
        state: dict[str, Any] = {"ready": not self.problem, "reason": self.problem or None}
        if heartbeat is not None:
            state |= {"busy": heartbeat.busy, "progress": heartbeat.progress}
        return state


def model_report(state: ModelState | None) -> dict[str, Any]:
    """Return the fields of a model in /ready, from the scheduler's state of its version."""
    if state is None:
        return {"ready": False, "reason": "the scheduler has not reported it yet"}
    return {
        "ready": state.ready,
        "reason": None if state.ready else state.reason or "not ready",
        "waiting": state.waiting,
        "running": state.running,
        "kv_free_pages": state.kv_free_pages,
        "kv_total_pages": state.kv_total_pages,
    }
