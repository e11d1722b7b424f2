"""A KV manager on a real socket: sessions without pages."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.ipc.endpoint import Hub
from pipeline.protocol import messages as m
from stages.kv.sessions.model_sessions import answer
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_files import SessionFiles
from stages.kv.sessions.session_store import SessionStore
from tests.gateway.threaded import Threaded

MAX_SESSIONS = 3


def open_sessions(
    directory: Path, clock: Callable[[], float] = time.time, bounds: SessionBounds | None = None
) -> SessionStore:
    bounds = bounds or SessionBounds(MAX_SESSIONS, 4096)
    return SessionStore(SessionFiles(directory), lambda salt: b"\0" * 16, 1 << 20, bounds, clock)


class KvPeer(Threaded):
    def __init__(self, config: Config, directory: Path, bounds: SessionBounds | None = None) -> None:
        super().__init__(config, 0.02)
        self.directory = directory
        self.bounds = bounds
        self.late_s = 0.0  # added to the clock of the sessions
        self.held_back: type[m.Frame] | None = None  # frames of that type are dropped
        self.lost: queue.SimpleQueue[m.Frame] = queue.SimpleQueue()
        self.sessions: SessionStore | None = None
        self._hub: Hub | None = None
        self.start()
        self.do(lambda: None)  # waits until the thread runs

    def held(self, session_id: str, tenant: str = "default") -> list[int]:
        """Return the tokens of a session."""

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
        self.held_back = None
        self.sessions = open_sessions(self.directory, lambda: time.time() + self.late_s, self.bounds)
        self._hub = self.bind("gateway-kv", "kv")
        self._hub.on_down = lambda peer, hello: self.sessions.drop_holder(peer) if self.sessions else None

    def die(self) -> None:
        assert self._hub is not None
        self._hub.close(0)
        self._hub = self.sessions = None

    def hubs(self) -> list[Hub]:
        return [] if self._hub is None else [self._hub]

    def serve_round(self) -> None:
        for hub in self.hubs():
            self._round(hub)

    def _round(self, hub: Hub) -> None:
        for peer, frame in hub.receive():
            if self.held_back is not None and isinstance(frame, self.held_back):
                self.lost.put(frame)
                continue
            reply = answer(self.sessions, peer, frame)
            if reply is not None:
                hub.send(peer, reply)
        hub.tick(m.Heartbeat("kv", self._epoch, 0, False, True))
