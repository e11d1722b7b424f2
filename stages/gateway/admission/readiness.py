"""Can this server take a request now, and if not, who is in the way? Pure; the clock is given.

Each stage speaks for itself: its heartbeats carry ready, busy, a reason and a counter of progress.  The
gateway hears the tokenizer, the scheduler and kv; the scheduler's model states carry what it knows of the
workers.  Long work that does progress never makes a stage unready; a counter that stands while there is
work does, and a stage that is silent does: both are known within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.protocol.messages import Heartbeat, ModelState
from pipeline.runtime import timer_coalescing

STUCK_S = 0.6  # busy with the same progress for longer: not ready
SILENT_S = 0.7  # no heartbeat for longer: not ready. The connection is given up later: that costs work
QUIET_S = 0.2  # more, of a stage that has said that it rests: its ticks are rarer, and so are ours
LOOK_S = timer_coalescing.ALIGN_S + 0.1  # between two looks at most, or we were away ourselves
SILENT_BEATS = 3  # heartbeats that may fail to come, where they are rare


class StageHealth:
    """What is known of one peer."""

    def __init__(self, stage: str, clock: Callable[[], float], heartbeat_s: float = 0.25) -> None:
        self.stage = stage
        self._clock = clock
        self._stuck_s = max(STUCK_S, SILENT_BEATS * heartbeat_s - 0.15)
        self._silent_s = max(SILENT_S, SILENT_BEATS * heartbeat_s)
        self._beat: Heartbeat | None = None
        self._looked_at = self._heard_at = clock()
        self._progressed_at = clock()
        self._is_up = False
        self._was_up = False

    def up(self) -> None:
        self._is_up = self._was_up = True
        self._beat = None
        self._progressed_at = self._heard_at = self._looked_at = self._clock()

    def down(self) -> None:
        self._is_up = False
        self._beat = None

    def beat(self, beat: Heartbeat | None) -> None:
        """The last heartbeat heard; call at least every `LOOK_S`."""
        now = self._clock()
        # Time in which we did not look (stopped, starved) is not the peer's silence.
        lost = max(0.0, now - self._looked_at - LOOK_S)
        self._heard_at += lost
        self._progressed_at += lost
        self._looked_at = now
        last = self._beat
        if beat is None or beat is last:
            return
        self._heard_at = now
        if last is None or not beat.busy or (beat.epoch, beat.progress) != (last.epoch, last.progress):
            self._progressed_at = now
        self._beat = beat

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def problem(self) -> str:
        """Why it is not ready; "" when it is."""
        if not self._is_up:
            return "not running" if self._was_up else "not started yet"
        beat = self._beat
        if beat is None:
            return "no heartbeat yet"
        if not beat.ready:
            return beat.reason or "not ready"
        now = self._clock()
        if now - self._heard_at > self._silent_s + (QUIET_S if beat.idle else 0.0):
            return f"silent for {now - self._heard_at:.1f} s"
        standing = now - self._progressed_at
        if beat.busy and standing > self._stuck_s:
            return f"has work and has made no progress for {standing:.1f} s"
        return ""

    def report(self) -> dict[str, Any]:
        beat = self._beat
        state: dict[str, Any] = {"ready": not self.problem, "reason": self.problem or None}
        if beat is not None:
            state |= {"busy": beat.busy, "progress": beat.progress}
        return state


def model_report(state: ModelState | None) -> dict[str, Any]:
    """Of a model, as the scheduler tells it."""
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
