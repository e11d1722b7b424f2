"""Streams whose model no other agent has ready: they go on when it is loaded, or when their agent is back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import poll_until
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet, TestAgent
from tests.orchestrator.streams import BODY, hold, plain

KEY = "agents/one"


def content(raw: bytes) -> tuple[list[int], Any]:
    """The tokens of a stream, none twice, and its last event. A restarted engine joins the events that it has kept."""
    events = [json.loads(line[6:]) for line in plain(raw).splitlines() if line.startswith(b"data: {")]
    tokens: list[int] = []
    for event in events[:-1]:
        assert event.get("start", len(tokens)) == len(tokens)
        tokens += event.get("tokens", ())
    return tokens, events[-1]


class Site:
    """A fleet whose agent "one" has the model, while agent "two" can load it, and a held stream at agent "one"."""

    def __init__(self, home: Path, engines: list[Server], **bounds: int) -> None:
        self.fleet = Fleet(home, silent_ms=600_000, max_waiting=1, **bounds)
        self.engines = engines
        self.one = self.fleet.add_agent("one", engines[0])
        self.two = self.fleet.agents["two"] = TestAgent("two", self.fleet.secret)
        self.two.cold[MODEL] = engines[1]
        self.fleet.register(self.two)
        self.undisturbed = engines[1].post("/v1/generate", {**BODY, "stream": True}).body
        self._connections: list[HTTPConnection] = []

    def begin(self, n_streams: int = 1) -> list[tuple[HTTPResponse, bytes]]:
        """Streams at agent "one", each with what has come of it: a few tokens."""
        engine = self.engines[0]
        hold(engine)
        self._connections = [self.fleet.connect() for _ in range(n_streams)]
        for connection in self._connections:
            body = json.dumps({**BODY, "stream": True}).encode()
            connection.request("POST", "/v1/generate", body, {"Content-Type": "application/json"})
        poll_until(lambda: len(engine.peers.do(lambda: engine.peers.generator.running)) == n_streams)
        engine.peers.do(lambda: engine.peers.generator.step(3))
        responses = [connection.getresponse() for connection in self._connections]
        return [(one, one.read1(1 << 16)) for one in responses]

    def check(self, *streams: tuple[HTTPResponse, bytes]) -> None:
        """Each of them is the answer that no one has disturbed."""
        for response, received in streams:
            assert content(received + response.read()) == content(self.undisturbed)

    def engine_dies(self) -> None:
        self.engines[0].process.kill()

    def engine_starts(self) -> None:
        hold(self.engines[0], False)
        self.engines[0].kill_and_restart()
        self.engines[0].wait_ready()

    def host_dies(self) -> None:
        self.one.is_silent = True
        self.engine_dies()

    def leaves(self) -> None:
        """As on SIGTERM: its engine goes on."""
        self.fleet.write(KEY, None)
        self.fleet.wait(lambda state: [one["agent_id"] for one in state["agents"]] == ["two"])

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for engine in self.engines:
            hold(engine, False)
        if self.engines[0].process.poll() is not None:
            self.engine_starts()
        assert self.fleet.close() == 0, "".join(self.fleet.lines)


@pytest.fixture
def site(homes: Callable[[], Path], engines: list[Server]) -> Iterator[Site]:
    made = Site(homes(), engines)
    yield made
    made.close()


def test_a_model_is_loaded_for_streams_that_have_begun(site: Site) -> None:
    """For all of them: what an engine had before is not refused for the requests that wait."""
    streams = site.begin(3)
    site.host_dies()
    assert site.two.loading.wait(60)
    site.two.may_load.set()
    site.check(*streams)
    assert site.two.loads == [MODEL]


def test_an_engine_that_starts_again_keeps_its_stream(site: Site) -> None:
    (stream,) = site.begin()
    site.one.withdrawn.add(MODEL)  # as while it starts
    site.one.cold[MODEL] = site.engines[0]
    site.fleet.wait(lambda state: not any(one["ready"] for one in state["models"]))
    site.engine_dies()
    assert site.one.loading.wait(60)
    site.engine_starts()
    site.one.may_load.set()
    site.check(stream)
    assert site.two.loads == []


def test_a_stream_for_which_no_agent_can_load_the_model_waits_for_its_own(site: Site) -> None:
    site.two.memory = 0
    (stream,) = site.begin()
    site.host_dies()
    poll_until(lambda: site.two.loads)
    site.engine_starts()
    site.one.is_silent = False
    site.check(stream)


def test_a_stream_waits_for_the_only_agent_that_knows_its_model(site: Site) -> None:
    site.two.cold.clear()
    n_polls = site.two.polls
    poll_until(lambda: site.two.polls > n_polls + 1)  # until the orchestrator has received it
    (stream,) = site.begin()
    site.leaves()
    site.engine_dies()
    poll_until(lambda: any("an agent lost a request" in line for line in site.fleet.lines))
    site.engine_starts()
    site.one.incarnation = "2"
    site.fleet.register(site.one)
    site.check(stream)


def test_a_stream_ends_at_an_agent_that_leaves(site: Site) -> None:
    (stream,) = site.begin()
    site.leaves()
    hold(site.engines[0], False)
    site.check(stream)
    assert site.two.loads == []


def test_a_stream_at_an_agent_that_leaves_can_be_cancelled(site: Site) -> None:
    ((response, received),) = site.begin()
    site.leaves()
    connection = site.fleet.connect()
    connection.request("DELETE", f"/v1/requests/{response.headers['X-Request-Id']}")
    answer = connection.getresponse()
    assert answer.status == 200 and json.loads(answer.read())["cancelled"]
    connection.close()
    assert b"cancelled" in received + response.read()
    assert site.two.loads == []


def test_a_stream_that_has_not_ended_with_its_agent_goes_on_elsewhere(site: Site) -> None:
    (stream,) = site.begin()
    site.leaves()
    site.engine_dies()
    site.two.may_load.set()
    site.check(stream)
    assert site.two.loads == [MODEL]


def test_a_further_copy_is_loaded_for_a_stream_when_the_agents_with_its_model_are_full(
    homes: Callable[[], Path], engines: list[Server]
) -> None:
    site = Site(homes(), engines, max_per_agent=1)
    try:
        (stream,) = site.begin()
        site.two.engines[MODEL] = engines[1]
        site.fleet.wait(lambda state: [one["agents"] for one in state["models"]] == [["one", "two"]])
        hold(engines[1])
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(site.fleet.post("/v1/generate", BODY)))
        thread.start()
        site.fleet.wait(lambda state: [one["under_way"] for one in state["agents"]] == [1, 1])
        three = site.fleet.agents["three"] = TestAgent("three", site.fleet.secret)
        three.cold[MODEL] = engines[1]
        site.fleet.register(three)
        site.host_dies()
        assert three.loading.wait(60)
        three.may_load.set()
        poll_until(lambda: len(engines[1].peers.do(lambda: engines[1].peers.generator.running)) == 2)
        hold(engines[1], False)
        site.check(stream)
        thread.join()
        assert [one.status for one in answers] == [200] and three.loads == [MODEL]
    finally:
        site.close()


def test_a_load_at_an_agent_that_starts_anew_is_begun_again(site: Site) -> None:
    """Its first answer is not waited for: it may have been lost with its host."""
    (stream,) = site.begin()
    site.host_dies()
    assert site.two.loading.wait(60)
    site.two.incarnation = "2"
    site.fleet.register(site.two)
    poll_until(lambda: len(site.two.loads) == 2)
    site.two.may_load.set()
    site.check(stream)
