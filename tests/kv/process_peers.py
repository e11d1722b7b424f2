"""The peers of a real kv process, and faults that are injected while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests import live_faults
from tests.kv.process import PAGE_TOKENS, WAIT_S, Gateway, Scheduler


def words(*numbers: int) -> list[int]:
    """A page of tokens for each number, and one token more."""
    return [number for number in numbers for _ in range(PAGE_TOKENS)] + [1]


class Peers:
    """A scheduler, a gateway, and the faults of a running process."""

    def __init__(self, home: Path, digest: str) -> None:
        self.scheduler = Scheduler(home, digest)
        self.gateway = Gateway(home)
        self.home = home

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        self.gateway.link.close()

    def idle(self, seconds: float) -> None:
        """Send heartbeats only."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.scheduler.turn()
            self.gateway.turn()

    def wait(self, condition: Callable[[], object]) -> None:
        """Send heartbeats until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.idle(0.02)

    def wait_up(self) -> None:
        self.wait(lambda: self.scheduler.ready is not None and self.gateway.link.peer is not None)

    def wait_down(self) -> None:
        self.wait(lambda: self.scheduler.ready is None and self.gateway.link.peer is None)

    def begin(self, plan: str) -> None:
        """Inject faults; a process that is up has them from here on, another one from its first turns on."""
        live_faults.begin(self.home, plan, self.wait if self.scheduler.ready is not None else None)

    def end(self) -> None:
        live_faults.end(self.home, self.wait if self.scheduler.ready is not None else None)
