"""Streams of an agent that drains: they go on there until another agent has computed their prompt and tokens."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.fleet import token
from pipeline.protocol import messages as m
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet
from tests.orchestrator.streams import BODY, MINE, hold, plain, step

NAMES = ("one", "two")
STREAM = {**BODY, "stream": True}


class Stream:
    """A stream, the engine that has it, and the one that is to get it. Neither makes tokens by itself."""

    def __init__(self, fleet: Fleet, engines: list[Server], body: dict[str, Any], n_tokens: int = 5) -> None:
        fleet.wait(lambda state: all(one["health"] == "READY" for one in state["agents"]))
        self.undisturbed = engines[0].post("/v1/completions", body).body
        self._fleet = fleet
        self._n_choices = int(body.get("n", 1))
        for engine in engines:
            hold(engine)
        self._connection = fleet.connect()
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **MINE}
        )
        state = fleet.wait(lambda state: any(one["under_way"] for one in state["agents"]))
        at = [bool(one["under_way"]) for one in state["agents"]].index(True)
        self.agent, self.old, self.new = NAMES[at], engines[at], engines[1 - at]
        self._n_before = len(self.new.peers.generator.submitted)
        while len(self.old.peers.generator.running) < self._n_choices:
            time.sleep(0.005)  # a choice that comes later has fewer tokens
        step(self.old, 1)  # without an event the response does not begin
        self.response: http.client.HTTPResponse = self._connection.getresponse()
        self.name = self.response.headers["X-Starling-Request"]
        self.received = b""
        self._n_events = self._n_choices  # of that step
        self.go_on(n_tokens - 1)

    def go_on(self, n_tokens: int) -> None:
        """The old engine makes tokens of each choice, and the client gets an event for each."""
        for _ in range(n_tokens):
            self._n_events += self._n_choices
            step(self.old, 1)
            while self.received.count(b"data: ") < self._n_events:
                data = self.response.read1(1 << 16)
                assert data, self.received
                self.received += data

    def drain(self, is_draining: bool = True) -> None:
        operator = token.authorization(self._fleet.secret)
        body = {"agent": self.agent, "cordoned": is_draining, "drain": is_draining}
        assert self._fleet.post("/v1/fleet/cordon", body, operator).status == 200

    def submitted(self) -> list[m.Submit]:
        """What the successor was sent since the stream began."""
        return self.new.peers.generator.submitted[self._n_before :]

    def close(self) -> None:
        self._connection.close()
        self.drain(False)
        self._fleet.wait(lambda state: not any(one["cordoned"] or one["under_way"] for one in state["agents"]))


@pytest.fixture(scope="module")
def fleet(homes: Callable[[], Path], engines: list[Server]) -> Iterator[Fleet]:
    """As in conftest.py, with agents that are never silent for too long, however busy the machine is."""
    keys = [{"key": "sk-mine", "tenant": "mine"}]
    running = Fleet(homes(), {"auth": {"api_keys": keys}}, wait_ms=1000, silent_ms=600_000)
    for name, engine in zip(NAMES, engines):
        running.add_agent(name, engine)
    yield running
    assert running.close() == 0, "".join(running.lines)


@pytest.fixture(autouse=True)
def going_on(engines: list[Server]) -> Iterator[None]:
    yield
    for engine in engines:
        engine.peers.generator.refuse = lambda frame: None
        hold(engine, False)


@pytest.fixture(params=[1, 2], ids=["one choice", "two choices"])
def stream(request: pytest.FixtureRequest, fleet: Fleet, engines: list[Server]) -> Iterator[Stream]:
    made = Stream(fleet, engines, {**STREAM, "n": request.param})
    yield made
    for engine in engines:
        hold(engine, False)
    made.close()


def test_a_stream_goes_on_while_its_successor_computes(stream: Stream) -> None:
    stream.drain()
    while not stream.submitted():
        time.sleep(0.005)
    # The successor has only begun: the client still gets events.
    stream.go_on(4)
    known = {frame.request for frame in stream.submitted()}
    assert stream.name not in known
    hold(stream.new, False)
    stream.received += stream.response.read()
    assert plain(stream.received) == plain(stream.undisturbed)
    copies = [frame for frame in stream.submitted() if frame.request != stream.name]
    moved = [frame for frame in stream.submitted() if frame.request == stream.name]
    assert copies and all(frame.forced for frame in copies)
    # It continued from the tokens that came while it computed.
    assert min(len(frame.forced) for frame in moved) // 4 >= 8
    while stream.new.peers.generator.running:
        time.sleep(0.005)  # until the copies have been ended
    while stream.old.peers.generator.running:
        time.sleep(0.005)  # until the old engine has stopped, too


def test_a_stream_stays_while_its_successor_refuses_the_copy(fleet: Fleet, engines: list[Server]) -> None:
    stream = Stream(fleet, engines, STREAM)
    refused: list[str] = []

    def refuse(frame: m.Submit) -> m.Rejected:
        refused.append(frame.request)
        return m.Rejected(frame.sequence, "INTERNAL", "refused by the test")

    stream.new.peers.generator.refuse = refuse
    stream.drain()
    while not refused:
        time.sleep(0.005)
    stream.go_on(4)
    assert stream.name not in refused
    stream.new.peers.generator.refuse = lambda frame: None
    hold(stream.new, False)
    stream.received += stream.response.read()
    assert plain(stream.received) == plain(stream.undisturbed)
    assert stream.name in {frame.request for frame in stream.submitted()}
    stream.close()


def test_a_stream_that_ends_meanwhile_is_not_moved(fleet: Fleet, engines: list[Server]) -> None:
    stream = Stream(fleet, engines, STREAM)
    stream.drain()
    while not stream.submitted():
        time.sleep(0.005)
    hold(stream.old, False)
    stream.received += stream.response.read()
    assert plain(stream.received) == plain(stream.undisturbed)
    while stream.new.peers.generator.running:
        time.sleep(0.005)  # until the copy has been ended
    assert stream.name not in {frame.request for frame in stream.submitted()}
    stream.close()


def test_an_agent_that_dies_while_it_drains_loses_nothing(fleet: Fleet, engines: list[Server]) -> None:
    stream = Stream(fleet, engines, STREAM)
    stream.drain()
    while not stream.submitted():
        time.sleep(0.005)
    stream.old.process.kill()
    hold(stream.new, False)
    stream.received += stream.response.read()
    assert plain(stream.received) == plain(stream.undisturbed)
    stream.old.kill_and_restart()
    hold(stream.old, False)
    stream.old.wait_ready()
    stream.close()
