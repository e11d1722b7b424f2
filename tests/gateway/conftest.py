"""One gateway process for the tests of a module; tests that stop or configure it start their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.server import Server


@pytest.fixture(scope="module")
def homes() -> Iterator[Callable[[], Path]]:
    """New directories with paths short enough for sockets."""
    base = Path(tempfile.mkdtemp(prefix="gw-"))
    count = iter(range(1000))
    yield lambda: base / str(next(count))
    shutil.rmtree(base, ignore_errors=True)  # a process that a test has killed may still end


@pytest.fixture(scope="module")
def server(homes: Callable[[], Path]) -> Iterator[Server]:
    running = Server(homes(), scheduler={"max_output_tokens": 300})
    running.wait_ready()
    yield running
    assert running.close() == 0


@pytest.fixture
def make_server(homes: Callable[[], Path]) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(**sections: Any) -> Server:
        servers.append(Server(homes(), **sections))
        return servers[-1]

    yield make
    for running in servers:
        running.close()
