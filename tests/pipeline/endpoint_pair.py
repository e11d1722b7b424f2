"""A hub and a link over a real ipc socket, with a clock that the test sets."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import zmq

from pipeline.ipc import edge_keys
from pipeline.ipc.endpoint import Hub, Link
from pipeline.protocol import messages as m
from pipeline.protocol.topology import EDGES, Edge

EDGE = EDGES["scheduler-kv"]
HEARTBEAT_MS = 100
LONG_S = 60.0


class Clock:
    """Seconds; `now` is the test's to set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """A hub (kv) and links (scheduler) in one process, and everything that happened, in order."""

    def __init__(self, directory: Path, address: str = "", edge: Edge = EDGE) -> None:
        self.edge = edge
        self.keys = edge_keys.load_or_create(directory) if address.startswith("tcp://") else None
        self.address = address or f"ipc://{directory}/x.sock"
        self.clock = Clock()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events: list[tuple[Any, ...]] = []
        self.opened: list[Link | Hub] = []
        self.is_starved = False  # the silent peer waits for a core
        self.hub = self.open_hub(1)
        self.link = self.open_link(1)

    def open_hub(self, epoch: int) -> Hub:
        """A hub of that epoch."""
        hub = Hub(
            self.edge,
            self.address,
            "kv",
            heartbeat_ms=HEARTBEAT_MS,
            clock=self.clock,
            context=self.context,
            epoch=epoch,
            keys=self.keys,
        )
        hub.on_up = lambda peer, hello: self.events.append(("hub up", hello.epoch))
        hub.on_down = lambda peer, hello: self.events.append(("hub down", hello.epoch))
        hub.liveness.is_runnable = lambda pid: self.is_starved
        self.opened.append(hub)
        return hub

    def open_link(self, epoch: int) -> Link:
        """A link of that epoch."""
        link = Link(
            self.edge,
            self.address,
            "scheduler",
            heartbeat_ms=HEARTBEAT_MS,
            clock=self.clock,
            context=self.context,
            epoch=epoch,
            keys=self.keys,
        )
        link.on_up = lambda hello: self.events.append(("link up", hello.epoch))
        link.on_down = lambda hello: self.events.append(("link down", hello.epoch))
        link.liveness.is_runnable = lambda pid: self.is_starved
        self.opened.append(link)
        return link

    def tick(self, *endpoints: Link | Hub) -> None:
        """Tick them, both by default."""
        for endpoint in endpoints or (self.hub, self.link):
            endpoint.tick(m.Heartbeat(endpoint.stage, endpoint.epoch, 7, True, True))

    def read(self, endpoint: Link | Hub) -> list[m.Frame]:
        """Receive, and note the frames as events."""
        frames = [item[1] if isinstance(item, tuple) else item for item in endpoint.receive()]
        self.events += [("frame", frame) for frame in frames]
        return frames

    def until(self, condition: Any, ticking: bool = True) -> None:
        """Serve hub and link, waiting on their descriptors alone, until `condition()`."""
        poll = select.poll()
        for endpoint in (self.hub, self.link):
            if endpoint.fd >= 0:
                poll.register(endpoint.fd, select.POLLIN)
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline, self.events[-20:]
            if ticking:
                self.clock.now += HEARTBEAT_MS / 1000
                self.tick()
            for fd, _ in poll.poll(200):  # ten rounds without a frame are silence; zmq's thread may get no core
                self.read(self.hub if fd == self.hub.fd else self.link)

    def meet(self) -> bytes:
        """Until both are up; the hub's key of the link."""
        self.until(lambda: self.hub.peers and self.link.peer)
        self.events.clear()
        return next(iter(self.hub.peers))

    def close(self) -> None:
        """Close all endpoints."""
        for endpoint in self.opened:
            endpoint.close(0)
        self.context.term()


def wait_readable(endpoint: Link | Hub) -> None:
    """Until its descriptor is readable."""
    poll = select.poll()
    poll.register(endpoint.fd, select.POLLIN)
    assert poll.poll(LONG_S * 1000)
