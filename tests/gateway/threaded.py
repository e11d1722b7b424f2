"""A scripted peer of the gateway: hubs on real sockets, served by a thread."""

from __future__ import annotations

import abc
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline.config import addresses
from pipeline.config.schema import Config
from pipeline.ipc.endpoint import Hub
from pipeline.protocol.topology import EDGES


class Threaded(threading.Thread, abc.ABC):
    """`begin`, `hubs` and `serve_round` run in the thread, and so do functions given to `do`, between two rounds."""

    def __init__(self, config: Config, pause_s: float) -> None:
        """`pause_s`: longest time between two rounds."""
        super().__init__(daemon=True)
        self.config = config
        self._pause_s = pause_s
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._epoch = time.time_ns()
        self._is_over = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    @abc.abstractmethod
    def begin(self) -> None: ...

    @abc.abstractmethod
    def hubs(self) -> list[Hub]: ...

    @abc.abstractmethod
    def serve_round(self) -> None: ...

    def pause_s(self) -> float:
        """Longest time until the next round."""
        return self._pause_s

    def do(self, function: Callable[[], Any]) -> Any:
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._todo.put((function, done))
        os.eventfd_write(self._wake, 1)
        return done.get(timeout=60)

    def stop(self) -> None:
        def over() -> None:
            self._is_over = True

        self.do(over)
        self.join()
        os.close(self._wake)

    def bind(self, edge: str, stage: str) -> Hub:
        """Return the hub of a new process of a stage."""
        self._epoch += 1
        return Hub(
            EDGES[edge],
            addresses.edge_address(self.config, edge),
            stage,
            heartbeat_ms=self.config.server.heartbeat_ms,
            epoch=self._epoch,
        )

    def run(self) -> None:
        self.begin()
        while not self._is_over:
            select.select([self._wake, *(hub.fd for hub in self.hubs())], [], [], self.pause_s())
            try:
                os.eventfd_read(self._wake)
            except BlockingIOError:
                pass
            while not self._todo.empty():
                function, done = self._todo.get()
                done.put(function())
            self.serve_round()
        for hub in self.hubs():
            hub.close(0)
