"""A stage runtime around `select.poll`: frames, signals, ticks and work, one after the other.

    loop = PollLoop("kv", config)
    hub = loop.bind("scheduler-kv", on_frame)     # or loop.connect(...), or loop.add(endpoint, handler)
    loop.ready = True
    return loop.run(work)

Single-threaded.  A stage announces work that keeps it away from the loop for long with `allow_stall`.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from pipeline.config.schema import Config
from pipeline.ipc.endpoint import Hub, Link
from pipeline.protocol.messages import Frame
from pipeline.runtime import process
from pipeline.runtime.stage_runtime import TICK_S, StageRuntime

log = logging.getLogger("starling.loop")

MAX_WAIT_S = 60.0  # of one poll; ticks come sooner


class PollLoop(StageRuntime):
    """A `StageRuntime` around `select.poll`."""

    def __init__(
        self,
        stage: str,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stage, config, clock=clock)
        self.exit_code = process.EXIT_OK
        self._quit = False
        self._next_tick = float("-inf")
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add_fd(self._wake, self._woken)
        if self.parent_fd >= 0:
            self.add_fd(self.parent_fd, self._orphaned)
        self._old_handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old_handlers[number] = signal.signal(number, self._on_signal)

    # -------------------------------------------------------------- edges and descriptors

    def connect(self, edge: str, handler: Callable[[Frame], None]) -> Link:
        """A link on the named edge at its configured address. `handler(frame)`."""
        link = self.link(edge)
        self.add(link, handler)
        return link

    def bind(self, edge: str, handler: Callable[[bytes, Frame], None]) -> Hub:
        """A hub on the named edge at its configured address. `handler(peer, frame)`."""
        hub = self.hub(edge)
        self.add(hub, handler)
        return hub

    def add(self, endpoint: Link | Hub, handler: Callable[..., None]) -> None:
        """Read `endpoint` in this loop, tick it, close it at the end."""

        def read_hub(hub: Hub) -> None:
            """Handle all received frames."""
            for peer, frame in hub.receive():
                handler(peer, frame)

        def read_link(link: Link) -> None:
            """Handle all received frames."""
            for frame in link.receive():
                handler(frame)

        if endpoint not in self.endpoints:
            self.endpoints.append(endpoint)
        self.add_fd(
            endpoint.fd,
            (lambda: read_hub(endpoint)) if isinstance(endpoint, Hub) else (lambda: read_link(endpoint)),
        )

    def add_fd(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is readable (a pidfd, a control socket)."""
        self._callbacks[fd] = callback
        self._poll.register(fd, select.POLLIN)

    def remove_fd(self, fd: int) -> None:
        """Call before `fd` is closed. Unknown descriptors are ignored."""
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)

    # -------------------------------------------------------------- running

    def run(self, work: Callable[[], float | None]) -> int:
        """Run until a stop is requested; the exit code.

        `work` is called after every batch of frames, and when the delay it returned (s; None: until a
        frame) has passed.  After SIGTERM the loop continues while `busy`, for at most
        `server.drain_timeout_ms`; a second signal, or `quit`, ends it at once.
        An exception of `work` or of a handler is fatal: logged, exit code 1.
        """
        try:
            delay: float | None = 0.0
            has_seen_stop = False  # `work` has run since the stop was requested: only then is `busy` meaningful
            while not (self._quit or (has_seen_stop and self.drained)):
                self.poll(MAX_WAIT_S if delay is None else delay)
                has_seen_stop = self.stopping
                delay = work()
                if self.is_idle and self.busy:
                    self.mark_active()
        except Exception:
            log.exception("fatal error, stage exits")
            self.exit_code = self.exit_code or process.EXIT_FATAL
        finally:
            self.close()
        return self.exit_code

    def poll(self, timeout_s: float) -> None:
        """One round: wait at most `timeout_s` for frames or signals, handle them, tick when due.

        For stages with a loop of their own, which check `stopping` (`drained`, `ended`) and call `close` at the end.
        """
        now = self.clock()
        if now >= self._next_tick or self.has_news:
            self.tick()
            now = self.clock()
        # If the tick has changed whether this stage is ready, the next one sends that.
        wait = 0.0 if self.has_news else max(0.0, min(timeout_s, self._next_tick + self.slack_s - now))
        for fd, _ in self._poll.poll(wait * 1000):
            callback = self._callbacks.get(fd)
            if callback is not None:
                callback()

    def tick(self) -> None:
        """As the base class; the next tick is due after its interval, also if this one was not of `poll`."""
        self._next_tick = self.clock() + TICK_S  # before the tick, which may read the clock again
        super().tick()
        self._next_tick = self.clock() + self.tick_s

    def mark_active(self) -> None:
        """As the base class; the next tick comes within 100 ms."""
        super().mark_active()
        self._next_tick = min(self._next_tick, self.clock() + TICK_S)

    @property
    def ended(self) -> bool:
        """`quit` was called, the parent has ended or a second signal has come: exit now."""
        return self._quit

    def quit(self, exit_code: int = process.EXIT_FATAL) -> None:
        """End `run` after this round with `exit_code`."""
        self._quit = True
        self.exit_code = exit_code

    def wake(self) -> None:
        """End the wait of `poll`; may be called by a signal handler or another thread."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Flush and close the edges, remove the records, release the lock. Idempotent."""
        if self._wake < 0:
            return
        super().close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        os.close(self._wake)
        self._wake = -1

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopping:
            self._quit = True
        self.stop()
        self.wake()  # poll() is resumed after a handler (PEP 475): this ends it

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _orphaned(self) -> None:
        log.error("parent process has ended")
        self.remove_fd(self.parent_fd)
        self.quit(process.EXIT_ORPHANED)
