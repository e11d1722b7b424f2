"""The life of a stage: armed against orphanhood, beating, told to stop, and gone with a code.

    loop = StageLoop("kv", config)
    hub = loop.bind("scheduler-kv", on_frame)     # or loop.connect(...), or loop.add(endpoint, handler)
    loop.ready = True
    return loop.run(work)

Single-threaded: frames, signals, ticks and `work` never interleave.  Every 100 ms it ticks: heartbeats
to the peers on all edges, a beat to the supervisor, the status record, systemd's watchdog.
A stage that stays away from the loop for long says so with `allow`.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import zmq

from pipeline import paths, process, rundir
from pipeline.config_schema import Config
from pipeline.edges import EDGES
from pipeline.messages import Frame, Heartbeat
from pipeline.status import StatusFile
from pipeline.wire import Hub, Link, process_epoch

log = logging.getLogger("starling.loop")

TICK_S = 0.1
STALL_MS = 10_000  # away from the loop for longer without `allow`: the supervisor kills the stage


class StageLoop:
    """One per process. `progress`, `busy`, `ready` and `reason` are the stage's to set."""

    def __init__(
        self,
        stage: str,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
        parent_pid: int | None = None,
    ) -> None:
        self._parent = process.die_with_parent(parent_pid)
        self.stage = stage
        self.config = config
        self.progress = 0  # grows while the stage does work
        self.busy = False  # it has work
        self.ready = False  # it can take work
        self.reason = "starting"  # why it is not ready
        self.stopping = False  # SIGTERM or SIGINT has come: finish, then let `busy` be False
        self.exit_code = process.EXIT_OK
        self.on_tick: list[Callable[[], Any]] = []
        self._clock = clock
        self._quit = False
        self._stopping_since = 0.0
        self._next_tick = float("-inf")
        self._next_watchdog = float("-inf")
        self._allowance_ms = STALL_MS
        self._beat_fd = process.beat_fd()
        self._watchdog_s = process.watchdog_interval_s()
        self._told_ready = False
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._endpoints: list[Link | Hub] = []

        run_dir = rundir.prepare(paths.run_dir(config))
        self._lock = rundir.StageLock(run_dir, stage)
        self._status = StatusFile(run_dir, stage, clock)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add_fd(self._wake, self._woken)
        if self._parent >= 0:
            self.add_fd(self._parent, self._orphaned)
        self._old_handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old_handlers[number] = signal.signal(number, self._on_signal)

    # -------------------------------------------------------------- edges and descriptors

    def connect(self, edge: str, handler: Callable[[Frame], None]) -> Link:
        """A link on the named edge at its configured address. `handler(frame)`."""
        link = Link(
            EDGES[edge], paths.edge_address(self.config, edge), self.stage,
            heartbeat_ms=self.config.server.heartbeat_ms, clock=self._clock, context=self.context,
        )
        self.add(link, handler)
        return link

    def bind(self, edge: str, handler: Callable[[bytes, Frame], None]) -> Hub:
        """A hub on the named edge at its configured address. `handler(peer, frame)`."""
        hub = Hub(
            EDGES[edge], paths.edge_address(self.config, edge), self.stage,
            heartbeat_ms=self.config.server.heartbeat_ms, clock=self._clock, context=self.context,
        )
        self.add(hub, handler)
        return hub

    def add(self, endpoint: Link | Hub, handler: Callable[..., None]) -> None:
        """Read `endpoint` in this loop, tick it, close it at the end."""
        if isinstance(endpoint, Hub):
            hub = endpoint

            def read() -> None:
                for peer, frame in hub.receive():
                    handler(peer, frame)
        else:
            link = endpoint

            def read() -> None:
                for frame in link.receive():
                    handler(frame)

        self._endpoints.append(endpoint)
        self.add_fd(endpoint.fd, read)

    def add_fd(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever `fd` is readable (a pidfd, a control socket)."""
        self._callbacks[fd] = callback
        self._poll.register(fd, select.POLLIN)

    def remove_fd(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)

    # -------------------------------------------------------------- running

    def run(self, work: Callable[[], float | None]) -> int:
        """Until told to stop; returns the exit code.

        `work` is called after every batch of frames, and when the delay it returned (s; None: until a
        frame) has passed.  After SIGTERM the loop goes on while `busy`, for at most
        `server.drain_timeout_ms`; a second signal, or `quit`, ends it at once.
        An exception of `work` or of a handler is fatal: logged, exit code 1.
        """
        try:
            delay: float | None = 0.0
            while not self._is_over():
                self.poll(TICK_S if delay is None else delay)
                delay = work()
        except Exception:
            log.exception("fatal error, the stage ends")
            self.exit_code = self.exit_code or process.EXIT_FATAL
        finally:
            self.close()
        return self.exit_code

    def poll(self, timeout_s: float) -> None:
        """One round: wait at most `timeout_s` for frames or signals, handle them, tick when due.

        For stages that own their loop, which also look at `stopping` and call `close` at the end.
        """
        now = self._clock()
        if now >= self._next_tick:
            self._tick(now)
        wait = max(0.0, min(timeout_s, self._next_tick - now))
        for fd, _ in self._poll.poll(wait * 1000):
            callback = self._callbacks.get(fd)
            if callback is not None:
                callback()

    def beat(self) -> Heartbeat:
        """What the peers are told now."""
        ready = self.ready and not self.stopping
        reason = "" if ready else "stopping" if self.stopping else self.reason
        return Heartbeat(self.stage, process_epoch(), self.progress, self.busy, ready, reason)

    def tick(self) -> None:
        """Tick now, for a stage that is about to stay away."""
        self._tick(self._clock())

    @contextmanager
    def allow(self, seconds: float) -> Iterator[None]:
        """The stage may stay away from the loop this long (loading, compiling) without being killed."""
        self._allowance_ms = int(seconds * 1000)
        self.tick()
        try:
            yield
        finally:
            self._allowance_ms = STALL_MS
            self.tick()

    def stop(self) -> None:
        """As SIGTERM: finish what is under way."""
        if not self.stopping:
            self.stopping = True
            self._stopping_since = self._clock()
            process.sd_notify("STOPPING=1")

    def quit(self, exit_code: int = process.EXIT_FATAL) -> None:
        """End `run` after this round with `exit_code`."""
        self._quit = True
        self.exit_code = exit_code

    def close(self) -> None:
        """Flush and close the edges, remove the status record, let go of the lock. Idempotent."""
        if self._wake < 0:
            return
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints = []
        self.context.term()
        self._status.remove()
        self._lock.release()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self._parent >= 0:
            os.close(self._parent)
        os.close(self._wake)
        self._wake = self._parent = -1

    def _is_over(self) -> bool:
        if self._quit:
            return True
        if not self.stopping:
            return False
        waited_ms = (self._clock() - self._stopping_since) * 1000
        return not self.busy or waited_ms >= self.config.server.drain_timeout_ms

    def _tick(self, now: float) -> None:
        self._next_tick = now + TICK_S
        beat = self.beat()
        for endpoint in self._endpoints:
            endpoint.tick(beat)
        if self._beat_fd >= 0:
            process.beat(self._beat_fd, self._allowance_ms)
        self._status.write(beat)
        if beat.ready and not self._told_ready:
            self._told_ready = True
            process.sd_notify("READY=1")
        if self._watchdog_s and now >= self._next_watchdog:
            self._next_watchdog = now + self._watchdog_s
            process.sd_notify("WATCHDOG=1")
        for callback in self.on_tick:
            callback()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            self._quit = True
        self.stop()
        # poll() is resumed after a handler (PEP 475): this ends it.
        os.eventfd_write(self._wake, 1)

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _orphaned(self) -> None:
        log.error("the parent process is gone")
        self.remove_fd(self._parent)
        self.quit(process.EXIT_ORPHANED)
