"""Links and hubs in an asyncio loop (gateway): readers, and one ticking task.

    endpoints = Endpoints("gateway", config)
    link = endpoints.connect("gateway-scheduler", on_frame)
    link.on_up = ...
    endpoints.start()            # in the running loop
    ...
    endpoints.close()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import zmq

from pipeline import paths
from pipeline.config_schema import Config
from pipeline.edges import EDGES
from pipeline.messages import Frame, Heartbeat
from pipeline.wire import Hub, Link, process_epoch

TICK_S = 0.1


def attach(endpoint: Link | Hub, handler: Callable[..., None]) -> Callable[[], None]:
    """Read `endpoint` in the running loop: `handler(frame)` or, of a hub, `handler(peer, frame)`.

    An exception of a handler goes to the loop's exception handler; the frames after it are still
    handled.  Returns a function that detaches.  Someone must call `endpoint.tick`.
    """
    loop = asyncio.get_running_loop()

    def items() -> list[tuple[Any, ...]]:
        if isinstance(endpoint, Hub):
            return list(endpoint.receive())
        return [(frame,) for frame in endpoint.receive()]

    def read() -> None:
        for item in items():
            try:
                handler(*item)
            except Exception as error:  # whatever it is, the other frames need handling
                message = f"handler of edge {endpoint.edge.name} failed"
                loop.call_exception_handler({"message": message, "exception": error})

    loop.add_reader(endpoint.fd, read)

    def detach() -> None:
        loop.remove_reader(endpoint.fd)

    return detach


class Endpoints:
    """All edges of an asyncio stage. Set `progress`, `busy`, `ready`, `reason`: heartbeats carry them."""

    def __init__(self, stage: str, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = stage
        self.config = config
        self.progress = 0
        self.busy = False
        self.ready = False
        self.reason = "starting"
        self.on_tick: list[Callable[[], Any]] = []
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoints: list[tuple[Link | Hub, Callable[..., None]]] = []
        self._detach: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None

    def connect(self, edge: str, handler: Callable[[Frame], None]) -> Link:
        link = Link(
            EDGES[edge], paths.edge_address(self.config, edge), self.stage,
            heartbeat_ms=self.config.server.heartbeat_ms, clock=self._clock, context=self._context,
        )
        self._endpoints.append((link, handler))
        return link

    def bind(self, edge: str, handler: Callable[[bytes, Frame], None]) -> Hub:
        hub = Hub(
            EDGES[edge], paths.edge_address(self.config, edge), self.stage,
            heartbeat_ms=self.config.server.heartbeat_ms, clock=self._clock, context=self._context,
        )
        self._endpoints.append((hub, handler))
        return hub

    def beat(self) -> Heartbeat:
        return Heartbeat(
            self.stage, process_epoch(), self.progress, self.busy, self.ready, "" if self.ready else self.reason
        )

    def start(self) -> None:
        """In the running loop: read all edges, tick every 100 ms."""
        self._detach = [attach(endpoint, handler) for endpoint, handler in self._endpoints]
        self._task = asyncio.get_running_loop().create_task(self._tick_forever())

    def tick(self) -> None:
        beat = self.beat()
        for endpoint, _ in self._endpoints:
            endpoint.tick(beat)
        for callback in self.on_tick:
            callback()

    async def _tick_forever(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """Stop reading and ticking; queued frames are flushed. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for detach in self._detach:
            detach()
        self._detach = []
        for endpoint, _ in self._endpoints:
            endpoint.close()
        self._endpoints = []
        self._context.term()
