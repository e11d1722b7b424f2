"""A kv on a real socket: the sessions of the kv stage without pages."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import messages as m
from pipeline import paths
from pipeline.config_schema import Config
from pipeline.edges import EDGES
from pipeline.wire import Hub
from stages.kv.session_files import SessionFiles
from stages.kv.session_frames import answer
from stages.kv.sessions import Sessions

MAX_SESSIONS = 3


def open_sessions(directory: Path, clock: Callable[[], float] = time.time) -> Sessions:
    return Sessions(SessionFiles(directory), lambda salt: b"\0" * 16, 1 << 20, MAX_SESSIONS, 4096, clock)


class KvPeer(threading.Thread):
    """`do` runs a function in the thread, between two rounds."""

    def __init__(self, config: Config, directory: Path) -> None:
        super().__init__(daemon=True)
        self.config = config
        self.directory = directory
        self.late_s = 0.0  # added to the clock of the sessions
        self.held_back: type[m.Frame] | None = None  # frames of that kind are lost
        self.lost: queue.SimpleQueue[m.Frame] = queue.SimpleQueue()
        self.sessions: Sessions | None = None
        self._hub: Hub | None = None
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._epoch = time.time_ns()
        self._is_over = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.start()
        self.do(self.begin)

    def do(self, function: Callable[[], Any]) -> Any:
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._todo.put((function, done))
        os.eventfd_write(self._wake, 1)
        return done.get(timeout=10)

    def stop(self) -> None:
        def over() -> None:
            self._is_over = True

        self.do(over)
        self.join()
        os.close(self._wake)

    def held(self, session_id: str, tenant: str = "default") -> list[int]:
        """Tokens of a session."""

        def read() -> list[int]:
            assert self.sessions is not None
            return next(list(s.tokens) for s in self.sessions.all() if (s.tenant, s.id) == (tenant, session_id))

        tokens: list[int] = self.do(read)
        return tokens

    def count(self) -> int:
        count: int = self.do(lambda: len(self.sessions or ()))
        return count

    # In the thread (through `do`).

    def begin(self) -> None:
        self._epoch += 1
        self.held_back = None
        self.sessions = open_sessions(self.directory, lambda: time.time() + self.late_s)
        self._hub = Hub(
            EDGES["gateway-kv"], paths.edge_address(self.config, "gateway-kv"), "kv",
            heartbeat_ms=self.config.server.heartbeat_ms, epoch=self._epoch,
        )  # fmt: skip
        self._hub.on_down = lambda peer, hello: self.sessions.drop_holder(peer) if self.sessions else None

    def die(self) -> None:
        assert self._hub is not None
        self._hub.close(0)
        self._hub = self.sessions = None

    def run(self) -> None:
        while not self._is_over:
            fds = [self._wake] if self._hub is None else [self._wake, self._hub.fd]
            select.select(fds, [], [], 0.02)
            try:
                os.eventfd_read(self._wake)
            except BlockingIOError:
                pass
            while not self._todo.empty():
                function, done = self._todo.get()
                done.put(function())
            if self._hub is not None:
                self._round(self._hub)
        if self._hub is not None:
            self._hub.close(0)

    def _round(self, hub: Hub) -> None:
        for peer, frame in hub.receive():
            if self.held_back is not None and isinstance(frame, self.held_back):
                self.lost.put(frame)
                continue
            reply = answer(self.sessions, peer, frame)
            if reply is not None:
                hub.send(peer, reply)
        hub.tick(m.Heartbeat("kv", self._epoch, 0, False, True))
