"""What every stage process does beside its work: be one, be watched, say how it is.

Watches its parent (whatever started the stage has called `process.die_with_parent` before any import);
holds the stage's lock; at every tick tells the supervisor that it lives, systemd that it is well, and
`starling status` and `/metrics` what it is doing.  `PollLoop` (poll) and `Endpoints` (asyncio) are a
`StageRuntime` with edges.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from pipeline.config import addresses, paths
from pipeline.config.schema import Config
from pipeline.faults import points
from pipeline.ipc.endpoint import Hub, Link
from pipeline.observe.metrics import Metrics
from pipeline.observe.status import StatusFile
from pipeline.protocol.messages import Heartbeat
from pipeline.protocol.topology import EDGES
from pipeline.runtime import process, timer_coalescing
from pipeline.runtime import run_dir as rundir

TICK_S = 0.1
SLACK_S = 0.025  # a tick waits so long for something that wakes the stage anyway: the wake-up costs more than it
QUIET_AFTER_S = 2.0  # without a move; from then on it ticks on the beat of rest.py
HEAR_S = 0.5  # after SIGTERM: how long until the heartbeats of others say whether they stop too
STALL_MS = 10_000  # away from the loop for longer without `allow`: the supervisor kills the stage


class StageRuntime:
    """One per process. `progress`, `busy`, `ready` and `reason` are the stage's to set.

    `stage` is the name that peers, locks and files know: a stage that runs several times gives
    each process one of its own (`worker-MODEL`).
    """

    def __init__(
        self,
        stage: str,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parent_fd = process.watch_parent()  # -1 when it cannot be watched
        if not stage.startswith("worker"):
            process.use_short_time_slice()  # before any thread, ZeroMQ's too
        self.stage = stage
        self.config = config
        self.progress = 0  # grows while the stage does work
        self.busy = False  # it has work
        self.ready = False  # it can take work
        self.reason = "starting"  # why it is not ready
        self.stopping = False  # told to stop: finish, then let `busy` be False
        self.on_tick: list[Callable[[], Any]] = []
        self.endpoints: list[Link | Hub] = []
        self.clock = clock
        self.is_idle = False  # ready and without work for a while: it ticks more seldom
        self._moved = (0, False, "")
        self._moved_at = clock()
        self._stopping_since = 0.0
        self._allowance_ms = STALL_MS
        self._keepalive_fd = process.claim_keepalive_fd()
        self._watchdog_s = process.watchdog_interval_s()
        self._next_watchdog = float("-inf")
        self._next_breath = float("-inf")
        self._told_ready = False
        self._closed = False

        run_dir = rundir.prepare(paths.run_dir(config))
        arena_dir = rundir.prepare(paths.arena_dir(config), "arena directory", "server.arena_dir")
        self._lock = rundir.StageLock(run_dir, stage)
        self._status = StatusFile(run_dir, stage, clock)
        self.metrics = Metrics(stage, arena_dir if config.metrics.enabled else None, clock=clock)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._faults = points.LivePlanFollower(run_dir)
        self._tell_supervisor()

    # -------------------------------------------------------------- edges

    def link(self, edge: str) -> Link:
        """Connect the named edge at its configured address; it is ticked and closed with the stage."""
        link = Link(
            EDGES[edge],
            addresses.edge_address(self.config, edge),
            self.stage,
            heartbeat_ms=self.config.server.heartbeat_ms,
            clock=self.clock,
            context=self.context,
            allow_remote=self.config.server.remote_edges,
        )
        self.endpoints.append(link)
        return link

    def hub(self, edge: str) -> Hub:
        """Bind the named edge at its configured address; it is ticked and closed with the stage."""
        hub = Hub(
            EDGES[edge],
            addresses.edge_address(self.config, edge),
            self.stage,
            heartbeat_ms=self.config.server.heartbeat_ms,
            clock=self.clock,
            context=self.context,
            allow_remote=self.config.server.remote_edges,
        )
        self.endpoints.append(hub)
        return hub

    # -------------------------------------------------------------- alive

    def beat(self) -> Heartbeat:
        """What the peers are told now."""
        ready = self.ready and not self.stopping
        reason = "" if ready else "stopping" if self.stopping else self.reason
        return Heartbeat(self.stage, process.process_epoch(), self.progress, self.busy, ready, reason, self.is_idle)

    def tick(self) -> None:
        """Every 100 ms, more seldom while it is quiet; also by a stage that is about to stay away."""
        self._look_around()
        beat = self.beat()
        for endpoint in self.endpoints:
            endpoint.tick(beat)
        if beat.ready and not self._told_ready:
            self._told_ready = True
            process.sd_notify("READY=1")
        self._tell_supervisor()
        self._status.write(beat)
        self.metrics.is_idle = self.is_idle
        if self.metrics.is_due:
            for endpoint in self.endpoints:
                edge = endpoint.edge.name
                self.metrics.set("starling_frames_dropped_total", endpoint.dropped, self.stage, edge)
                self.metrics.set("starling_frames_refused_total", endpoint.refused, self.stage, edge)
            self.metrics.write()
        now = self.clock()
        if self._watchdog_s and now >= self._next_watchdog:
            self._next_watchdog = now + self._watchdog_s
            process.sd_notify("WATCHDOG=1")
        self._faults.poll()
        for callback in self.on_tick:
            callback()

    def report_progress(self) -> None:
        """In the middle of long work that does progress, as often as it likes: peers and supervisor hear of it.

        Nothing is received and no callback runs, so that the work's state may be half-way.
        """
        now = self.clock()
        if now < self._next_breath:
            return
        self._next_breath = now + TICK_S
        self.progress += 1
        beat = self.beat()
        for endpoint in self.endpoints:
            endpoint.send_heartbeat_if_due(beat)
        self._tell_supervisor()

    def _look_around(self) -> None:
        """Is this stage quiet?"""
        now = self.clock()
        state = (self.progress, self.ready, self.reason)
        if self.busy or self.stopping or state != self._moved:
            self._moved, self._moved_at = state, now
        self.is_idle = self.ready and now - self._moved_at >= QUIET_AFTER_S

    def mark_active(self) -> None:
        """Something has come that ticks are wanted for: as often as ever from now on."""
        self._moved_at = self.clock()
        self.is_idle = False

    @property
    def tick_s(self) -> float:
        """From now until the next tick."""
        if not self.is_idle:
            return TICK_S
        is_listened_to = any(endpoint.edge.is_readiness_source for endpoint in self.endpoints)
        wait_s = timer_coalescing.ALIGN_S if is_listened_to or self._watchdog_s else timer_coalescing.IDLE_HEARTBEAT_S
        return timer_coalescing.until_aligned(self.clock(), wait_s)

    @property
    def slack_s(self) -> float:
        """How long a tick may wait for company."""
        return 0.0 if self.is_idle else SLACK_S

    @contextmanager
    def allow_stall(self, seconds: float) -> Iterator[None]:
        """The stage may stay away from its loop this long (loading, compiling) without being killed."""
        before, self._allowance_ms = self._allowance_ms, int(seconds * 1000)
        self.tick()
        try:
            yield
        finally:
            self._allowance_ms = before
            self._tell_supervisor()

    def stop(self) -> None:
        """As SIGTERM: finish what is under way."""
        if not self.stopping:
            self.stopping = True
            self._stopping_since = self.clock()
            process.sd_notify("STOPPING=1")

    @property
    def drained(self) -> bool:
        """Told to stop, and nothing is under way any more or its time is up."""
        if not self.stopping:
            return False
        waited_ms = (self.clock() - self._stopping_since) * 1000
        return not self.busy or waited_ms >= self.config.server.drain_timeout_ms

    @property
    def is_awaiting_heartbeats(self) -> bool:
        """Told to stop so lately that others may not have said yet whether they stop, too."""
        return self.clock() - self._stopping_since < HEAR_S

    def serves_stopping_clients(self, hub: Hub) -> bool:
        """Told to stop: peers of `hub` that stop, too, end their work through us; others turn to a successor."""
        if self.is_awaiting_heartbeats:
            return bool(hub.peers)
        beats = hub.last_heartbeat
        return any(peer in beats and beats[peer].reason == "stopping" for peer in hub.peers)

    def close(self) -> None:
        """Flush and close the edges, remove the records, let go of the lock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for endpoint in self.endpoints:
            endpoint.close()
        self.context.term()
        self._status.remove()
        self.metrics.remove()
        self._lock.release()
        if self.parent_fd >= 0:
            os.close(self.parent_fd)

    def _tell_supervisor(self) -> None:
        if self._keepalive_fd >= 0:
            process.send_keepalive(self._keepalive_fd, process.KeepAlive(self._allowance_ms, self._told_ready))
