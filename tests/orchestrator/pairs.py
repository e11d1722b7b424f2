"""What tests do with the orchestrators of a fleet: begin requests, kill one of them, and take an agent away."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

from tests.e2e.server import poll_until
from tests.orchestrator.fleet import Fleet, Pair
from tests.orchestrator.streams import MINE

NAMES = ("one", "two")  # of the agents


def begin(
    orchestrator: Fleet, path: str, body: dict[str, Any], headers: dict[str, str] = MINE
) -> http.client.HTTPConnection:
    """Send a request for a stream, and do not read its answer."""
    connection = orchestrator.connect()
    data = json.dumps({**body, "stream": True}).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    return connection


def read_until(response: http.client.HTTPResponse, part: bytes) -> bytes:
    """What comes up to a part of a stream."""
    received = b""
    while part not in received:
        data = response.read1(1 << 16)
        assert data, received
        received += data
    return received


def serving(orchestrator: Fleet) -> int:
    """The agent that has the one request under way, by its place in `NAMES`."""
    state = orchestrator.wait(lambda state: any(one["under_way"] for one in state["agents"]))
    return [bool(one["under_way"]) for one in state["agents"]].index(True)


def runner_of(pair: Pair) -> Pair:
    """The orchestrator that runs the one request in the background, whichever has taken it, and the other one."""

    def runs(orchestrator: Fleet) -> bool:
        return any(one["under_way"] for one in orchestrator.state()["agents"])

    poll_until(lambda: any(map(runs, pair)))
    first, second = pair
    return (first, second) if runs(first) else (second, first)


def wait_ready(orchestrator: Fleet, count: int = 2) -> None:
    """Wait until it has that many agents, and each has answered it."""
    orchestrator.wait(lambda state: [one["health"] for one in state["agents"]] == count * ["READY"])


def kill(orchestrator: Fleet) -> None:
    """SIGKILL; `restart` starts its successor."""
    orchestrator.process.kill()
    orchestrator.process.wait()


@contextlib.contextmanager
def without_agent(pair: Pair, name: str) -> Iterator[None]:
    """An agent has left, and answers none; afterwards it is there again. `pair[0]` may be dead meanwhile."""
    first, second = pair
    agent = first.agents[name]
    first.write(f"agents/{name}", None)
    agent.is_silent = True
    try:
        wait_ready(second, 1)
        yield
    finally:
        agent.is_silent = False
    if first.process.poll() is not None:
        first.restart()
    first.register(agent)
    for orchestrator in pair:
        wait_ready(orchestrator)
