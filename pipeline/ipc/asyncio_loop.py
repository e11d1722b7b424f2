"""A stage runtime in an asyncio loop (gateway): one reader per edge, and one timer for ticks.

loop = AsyncioLoop("gateway", config)
link = loop.connect("gateway-scheduler", on_frame)
link.on_up = ...
loop.start()            # in the running loop
await loop.stopped()    # SIGTERM, SIGINT or the parent's death, and drained
loop.close()
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pipeline.config.schema import Config
from pipeline.ipc.endpoint import Hub, Link
from pipeline.protocol.messages import Frame
from pipeline.runtime import process
from pipeline.runtime.stage_runtime import TICK_S, StageRuntime

log = logging.getLogger("starling.loop")


def attach(
    endpoint: Link | Hub, handler: Callable[..., None], after: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Read `endpoint` in the running loop: `handler(frame)`, for a hub `handler(peer, frame)`; then `after()`.

    An exception of a handler goes to the loop's exception handler; the frames after it are still
    handled.  Returns a function that detaches.  The caller must call `endpoint.tick`.
    """
    loop = asyncio.get_running_loop()

    def items() -> list[tuple[Any, ...]]:
        """Arguments of the handler, one tuple per frame."""
        if isinstance(endpoint, Hub):
            return list(endpoint.receive())
        return [(frame,) for frame in endpoint.receive()]

    def read() -> None:
        """Handle all received frames."""
        for item in items():
            try:
                handler(*item)
            except Exception as error:  # the other frames must be handled
                message = f"handler of edge {endpoint.edge.name} failed"
                loop.call_exception_handler({"message": message, "exception": error})
        after()

    loop.add_reader(endpoint.fd, read)

    def detach() -> None:
        """Stop reading."""
        loop.remove_reader(endpoint.fd)

    return detach


class AsyncioLoop(StageRuntime):
    """A `StageRuntime` in an asyncio loop."""

    def __init__(
        self,
        stage: str,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stage, config, clock=clock)
        self.exit_code = process.EXIT_OK
        self._handlers: list[tuple[Link | Hub, Callable[..., None]]] = []
        self._detach: list[Callable[[], object]] = []
        self._timer: asyncio.TimerHandle | None = None  # the next tick, from `start` to `close`
        self._stopped = asyncio.Event()
        self._next_tick = float("-inf")

    def connect(self, edge: str, handler: Callable[[Frame], None]) -> Link:
        """A link on the named edge at its configured address. `handler(frame)`. Call before `start`."""
        link = self.link(edge)
        self._handlers.append((link, handler))
        return link

    def bind(self, edge: str, handler: Callable[[bytes, Frame], None]) -> Hub:
        """A hub on the named edge at its configured address. `handler(peer, frame)`. Call before `start`."""
        hub = self.hub(edge)
        self._handlers.append((hub, handler))
        return hub

    def start(self, signals: bool = True) -> None:
        """In the running loop: read all edges, tick, handle SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        self._detach = [attach(endpoint, handler, self._after_frames) for endpoint, handler in self._handlers]
        if self.parent_fd >= 0:
            loop.add_reader(self.parent_fd, self._orphaned)
            self._detach.append(partial(loop.remove_reader, self.parent_fd))
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
                self._detach.append(partial(loop.remove_signal_handler, number))
        self._timer = loop.call_later(0.0, self._tick_now)

    async def stopped(self) -> int:
        """Wait until a stop is requested and `busy` is False or `server.drain_timeout_ms` has passed; the exit code.

        A second signal, or `quit`, ends the wait at once.
        """
        await self._stopped.wait()
        return self.exit_code

    def quit(self, exit_code: int = process.EXIT_FATAL) -> None:
        """End `stopped` now."""
        self.exit_code = exit_code
        self._stopped.set()

    def tick(self) -> None:
        """As the base class; ends `stopped` when the stage is drained."""
        super().tick()
        if self.drained:
            self._stopped.set()

    def mark_active(self) -> None:
        """As the base class; the next tick comes within 100 ms."""
        super().mark_active()
        self._next_tick = min(self._next_tick, self.clock() + TICK_S)
        self._set_timer()

    def tick_soon(self) -> None:
        """The next tick comes as soon as the loop has handled what it is handling."""
        self._next_tick = float("-inf")
        self._set_timer()

    def close(self) -> None:
        """Stop reading and ticking; queued frames are flushed. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for detach in self._detach:
            detach()
        self._detach = []
        super().close()

    def _after_frames(self) -> None:
        """Tick if a tick is due: frames have woken the stage anyway."""
        if self.clock() >= self._next_tick:
            self._tick_now()

    def _tick_now(self) -> None:
        try:
            self.tick()
        except Exception:
            log.exception("tick failed")
        self._next_tick = self.clock() + self.tick_s
        self._set_timer()

    def _set_timer(self) -> None:
        """Set again after each tick: a tick after frames must not leave an earlier timer that wakes needlessly."""
        if self._timer is not None:
            self._timer.cancel()
            delay = max(0.0, self._next_tick + self.slack_s - self.clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick_now)

    def _on_signal(self) -> None:
        if self.stopping:
            self._stopped.set()
        self.stop()

    def _orphaned(self) -> None:
        log.error("parent process has ended")
        asyncio.get_running_loop().remove_reader(self.parent_fd)
        self.quit(process.EXIT_ORPHANED)
