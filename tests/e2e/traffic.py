"""Streams that run without a pause while a test changes the server, each compared with an undisturbed stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from tests.e2e.server import Server

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 120, "ignore_eos": True, "temperature": 0.9}


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    assert not [event for event in events if "error" in event], events[-1]
    return [token for event in events for token in event.get("tokens", ())]


class Traffic:
    """Streams without a pause in `n` threads, each compared with an undisturbed stream of the same seed."""

    def __init__(self, server: Server, n: int = 3) -> None:
        self.server = server
        self.expected = {seed: tokens_of(list(self._stream(seed))) for seed in range(n)}
        self.streams = 0
        self.faults: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(n)]

    def _stream(self, seed: int) -> Iterator[dict[str, Any]]:
        return self.server.stream("/v1/generate", **REQUEST, seed=seed)

    def _run(self, seed: int) -> None:
        while not self._over.is_set():
            try:
                if tokens_of(list(self._stream(seed))) != self.expected[seed]:
                    self.faults.append(f"stream {seed} has other tokens")
            except Exception as error:
                self.faults.append(repr(error))
                return
            self.streams += 1

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
