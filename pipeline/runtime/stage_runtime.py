"""The runtime of a stage process: locks, supervision, status, metrics and heartbeats.

Holds the stage's lock and its share of the server's directory locks, and watches the parent process (the stage has
called `process.die_with_parent` before any other import).  Every tick sends a keepalive to the supervisor, the
watchdog notification to systemd and heartbeats to the peers, and updates the status record and the metrics.
`PollLoop` (poll) and `AsyncioLoop` (asyncio) are `StageRuntime`s with an event loop.
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
from pipeline.errors import ConfigError
from pipeline.faults import points
from pipeline.ipc import edge_keys
from pipeline.ipc.edge_keys import EdgeKeys
from pipeline.ipc.endpoint import Hub, Link
from pipeline.observe import logs
from pipeline.observe.log_levels import LogLevelFollower
from pipeline.observe.metrics import Metrics
from pipeline.observe.status import StatusFile
from pipeline.protocol.messages import Heartbeat
from pipeline.protocol.topology import EDGES
from pipeline.runtime import arena_dir as arenas
from pipeline.runtime import process, timer_coalescing
from pipeline.runtime import run_dir as rundir
from pipeline.runtime.directory_lock import ServerLocks

TICK_S = 0.1  # while a stage starts or stops, or something in it waits for a tick
_STEADY_S = timer_coalescing.STEADY_ALIGN_S
SLACK_S = 0.025  # a tick may be late by this much to share a wake-up with a frame
IDLE_AFTER_S = 2.0  # without progress; then ticks are aligned, see timer_coalescing.py
STOP_HEARTBEATS_S = 0.5  # after SIGTERM: time in which the peers' heartbeats report whether they stop, too
STALL_MS = 10_000  # keepalive allowance; a longer stall without `allow_stall` and the supervisor kills the stage


class StageRuntime:
    """One per process. `progress`, `busy`, `ready` and `reason` are the stage's to set.

    `stage` is the name in peers, locks and files: a stage that runs several times uses a name for each
    process (`worker-MODEL`).
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
        process.raise_file_limit()
        self.stage = stage
        self.config = config
        self.progress = 0  # grows while the stage does work
        self.busy = False  # it has work
        self.ready = False  # it can take work
        self.reason = "starting"  # why it is not ready
        self.stopping = False  # a stop is requested: finish, then set `busy` to False
        self.on_tick: list[Callable[[], Any]] = []
        self.endpoints: list[Link | Hub] = []
        self.clock = clock
        self.is_idle = False  # ready and without work for a while: it ticks less often
        self.is_steady = False  # set by the stage at its ticks: nothing in it waits for one, so they may be rarer
        self._last_state = (0, False, "")
        self._active_at = clock()
        self._stopping_since = 0.0
        self._allowance_ms = STALL_MS
        self._keepalive_fd = process.claim_keepalive_fd()
        self._watchdog_s = process.watchdog_interval_s()
        self._next_watchdog = float("-inf")
        self._next_report = float("-inf")
        self._was_ready = False
        self._closed = False

        run_dir = rundir.prepare(paths.run_dir(config))
        arena_dir = arenas.prepare(config)
        self._lock = rundir.StageLock(run_dir, stage)
        try:
            self._server_locks = ServerLocks(config, run_dir)
        except ConfigError:
            self._lock.release()
            raise
        self._status = StatusFile(run_dir, stage, clock)
        self.metrics = Metrics(stage, arena_dir if config.metrics.enabled else None, clock=clock)
        self.metrics.before_publish.append(self._measure_edges)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._faults = points.LivePlanFollower(run_dir)
        self._log_levels = LogLevelFollower(run_dir, stage, config.logging.level)
        self._send_keepalive()

    # -------------------------------------------------------------- edges

    def link(self, edge: str) -> Link:
        """Connect the named edge at its configured address; the link is ticked and closed with the stage."""
        address = addresses.edge_address(self.config, edge)
        link = Link(
            EDGES[edge],
            address,
            self.stage,
            heartbeat_ms=self.config.server.heartbeat_ms,
            clock=self.clock,
            context=self.context,
            allow_remote=self.config.server.remote_edges,
            keys=self._keys(address),
        )
        self.endpoints.append(link)
        return link

    def hub(self, edge: str) -> Hub:
        """Bind the named edge at its configured address; the hub is ticked and closed with the stage."""
        address = addresses.edge_address(self.config, edge)
        hub = Hub(
            EDGES[edge],
            address,
            self.stage,
            heartbeat_ms=self.config.server.heartbeat_ms,
            clock=self.clock,
            context=self.context,
            allow_remote=self.config.server.remote_edges,
            keys=self._keys(address),
        )
        self.endpoints.append(hub)
        return hub

    def _keys(self, address: str) -> EdgeKeys | None:
        """The keys of a tcp:// edge, from the state directory."""
        return None if address.startswith("ipc://") else edge_keys.load_or_create(paths.state_dir(self.config))

    # -------------------------------------------------------------- ticks

    def heartbeat(self) -> Heartbeat:
        """The heartbeat for the current state."""
        ready = self.ready and not self.stopping
        reason = "" if ready else "stopping" if self.stopping else self.reason
        return Heartbeat(self.stage, process.process_epoch(), self.progress, self.busy, ready, reason, self.is_idle)

    def tick(self) -> None:
        """Every 100 ms, less often in steady work and while idle."""
        self._update_idle()
        heartbeat, is_steady = self.heartbeat(), self._ticks_rarely
        for endpoint in self.endpoints:
            endpoint.liveness.is_steady = is_steady
            endpoint.tick(heartbeat)
        if heartbeat.ready and not self._was_ready:
            self._was_ready = True
            process.sd_notify("READY=1")
        self._send_keepalive()
        self._log_levels.poll()
        self._status.write(heartbeat)
        self.metrics.is_idle = self.is_idle
        if self.metrics.is_due:
            for endpoint in self.endpoints:
                edge = endpoint.edge.name
                self.metrics.set("starling_frames_dropped_total", endpoint.dropped, self.stage, edge)
                self.metrics.set("starling_frames_refused_total", endpoint.refused, self.stage, edge)
                self.metrics.set("starling_connections_refused_total", endpoint.refused_connections, self.stage, edge)
            self.metrics.write()
        now = self.clock()
        if self._watchdog_s and now >= self._next_watchdog:
            self._next_watchdog = now + self._watchdog_s
            process.sd_notify("WATCHDOG=1")
        self._faults.poll()
        logs.tick()
        for callback in self.on_tick:
            callback()

    def _measure_edges(self) -> None:
        """What changes with every heartbeat, so that it alone is no reason to publish."""
        for endpoint in self.endpoints:
            edge = self.stage, endpoint.edge.name
            self.metrics.set("starling_heartbeats_total", endpoint.heartbeats, *edge)
            self.metrics.set("starling_edge_bytes_total", endpoint.sent_bytes, *edge, "sent")
            self.metrics.set("starling_edge_bytes_total", endpoint.received_bytes, *edge, "received")
            for reason, count in endpoint.liveness.lost.items():
                self.metrics.set("starling_peers_lost_total", count, *edge, reason)

    def report_progress(self) -> None:
        """During long work, as often as convenient: counts progress, sends heartbeats and a keepalive.

        Nothing is received and no callback runs, so the stage's state need not be consistent.
        """
        now = self.clock()
        if now < self._next_report:
            return
        self._next_report = now + TICK_S
        self.progress += 1
        heartbeat = self.heartbeat()
        for endpoint in self.endpoints:
            endpoint.send_heartbeat_if_due(heartbeat)
        self._send_keepalive()

    def _update_idle(self) -> None:
        now = self.clock()
        state = (self.progress, self.ready, self.reason)
        if self.busy or self.stopping or state != self._last_state:
            self._last_state, self._active_at = state, now
        self.is_idle = self.ready and now - self._active_at >= IDLE_AFTER_S

    @property
    def has_news(self) -> bool:
        """Whether `ready` has changed since the last tick: peers wait for that."""
        return self.ready != self._last_state[1]

    def mark_active(self) -> None:
        """Work has arrived: tick, and send heartbeats, at the full rate again."""
        self._active_at = self.clock()
        self.is_idle = self.is_steady = False

    @property
    def _ticks_rarely(self) -> bool:
        """In steady work, unless peers expect more frequent heartbeats."""
        is_rare = self.config.server.heartbeat_ms >= 1000 * _STEADY_S
        return self.is_steady and is_rare and self.ready and not self.stopping

    @property
    def tick_s(self) -> float:
        """Seconds from now to the next tick."""
        if not self.is_idle:
            if self._ticks_rarely:
                return timer_coalescing.until_aligned(self.clock(), _STEADY_S, _STEADY_S)
            return TICK_S
        is_readiness_source = any(endpoint.edge.is_readiness_source for endpoint in self.endpoints)
        wait_s = (
            timer_coalescing.ALIGN_S if is_readiness_source or self._watchdog_s else timer_coalescing.IDLE_HEARTBEAT_S
        )
        return timer_coalescing.until_aligned(self.clock(), wait_s)

    @property
    def slack_s(self) -> float:
        """Seconds by which a tick may be late."""
        return 0.0 if self.is_idle else SLACK_S

    @contextmanager
    def allow_stall(self, seconds: float) -> Iterator[None]:
        """Within the block the stage may not tick for this long (loading, compiling) without being killed."""
        before, self._allowance_ms = self._allowance_ms, int(seconds * 1000)
        self.tick()
        try:
            yield
        finally:
            self._allowance_ms = before
            self._send_keepalive()

    def stop(self) -> None:
        """As SIGTERM: finish the current work."""
        if not self.stopping:
            self.stopping = True
            self._stopping_since = self.clock()
            self.mark_active()  # peers that stop, too, wait for the heartbeat that reports it
            process.notify_stopping(self.config.server.drain_timeout_ms / 1000)

    @property
    def drained(self) -> bool:
        """A stop is requested, and the work has finished or its drain time has passed."""
        if not self.stopping:
            return False
        waited_ms = (self.clock() - self._stopping_since) * 1000
        return not self.busy or waited_ms >= self.config.server.drain_timeout_ms

    def awaits_heartbeats(self, hub: Hub) -> bool:
        """While stopping: whether peers of `hub` may not have reported yet whether they stop, too.

        That takes a moment, and longer where no core is free for a peer or for what stops it.
        """
        if self.clock() - self._stopping_since < STOP_HEARTBEATS_S:
            return bool(hub.peers)
        return any(hub.liveness.is_held_up(peer) for peer in hub.peers)

    def serves_stopping_clients(self, hub: Hub) -> bool:
        """While stopping: whether peers of `hub` are stopping, too, and still need this stage to finish their work.

        Peers that are not stopping use the successor of this stage.
        """
        heartbeats = hub.last_heartbeat
        is_needed = any(peer in heartbeats and heartbeats[peer].reason == "stopping" for peer in hub.peers)
        return is_needed or self.awaits_heartbeats(hub)

    def close(self) -> None:
        """Flush and close the edges, remove the records, release the locks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for endpoint in self.endpoints:
            endpoint.close()
        self.context.term()
        self._status.remove()
        self.metrics.close()
        self._server_locks.release()
        self._lock.release()
        if self.parent_fd >= 0:
            os.close(self.parent_fd)

    def _send_keepalive(self) -> None:
        if self._keepalive_fd >= 0:
            process.send_keepalive(self._keepalive_fd, process.KeepAlive(self._allowance_ms, self._was_ready))
