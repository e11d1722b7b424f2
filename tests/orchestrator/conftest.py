"""One fleet of two engines for the tests of a module.

Its agents are never silent for too long, however busy the machine is.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.store_fixtures import bucket, etcd, redis  # noqa: F401  fixtures
from tests.gateway.server import Server
from tests.orchestrator.fleet import Fleet, Pair, TestAgent
from tests.orchestrator.stores import STORES, fleet_section
from tests.orchestrator.streams import hold


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `pair` that does not name its stores runs on the first of them."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "pair" in metafunc.fixturenames and not any(mark.args[0] == "pair" for mark in marks):
        metafunc.parametrize("pair", STORES[:1], indirect=True, scope="module")


@pytest.fixture(scope="module")
def homes() -> Iterator[Callable[[], Path]]:
    """New directories with paths short enough for sockets."""
    base = Path(tempfile.mkdtemp(prefix="or-"))
    count = iter(range(1000))
    yield lambda: base / str(next(count))
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def engines(homes: Callable[[], Path]) -> Iterator[list[Server]]:
    """Two gateways that give equal answers."""
    started = [Server(homes()) for _ in range(2)]
    for engine in started:
        engine.wait_ready()
    yield started
    for engine in started:
        engine.close()


@pytest.fixture(scope="module")
def fleet(homes: Callable[[], Path], engines: list[Server]) -> Iterator[Fleet]:
    """An orchestrator with the agents "one" and "two"."""
    keys = [
        {"key": "sk-mine", "tenant": "mine"},
        {"key": "sk-other", "tenant": "other"},
        {"key": "sk-admin", "tenant": "ops", "admin": True},
    ]
    running = Fleet(homes(), {"auth": {"api_keys": keys}}, wait_ms=1000, silent_ms=600_000)
    for name, engine in zip(("one", "two"), engines):
        running.add_agent(name, engine)
    yield running
    assert running.close() == 0, "".join(running.lines)


@pytest.fixture
def cold_agent(fleet: Fleet, engines: list[Server]) -> Iterator[TestAgent]:
    """The agent "two", which has the files of the model "cold"."""
    agent = fleet.agents["two"]
    agent.cold["cold"] = engines[1]
    fleet.wait(lambda state: any(one["id"] == "cold" for one in state["models"]))
    yield agent
    agent.may_load.set()
    agent.cold.clear()
    agent.engines.pop("cold", None)
    fleet.wait(lambda state: all(one["id"] != "cold" for one in state["models"]))


@pytest.fixture(scope="module")
def sections() -> dict[str, Any]:
    """Of the configuration of `pair`, besides its keys."""
    return {}


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, homes: Callable[[], Path], engines: list[Server], sections: dict[str, Any]
) -> Iterator[Pair]:
    """Two orchestrators of one fleet. The agents "one" and "two" belong to the first one's object."""
    keys = [{"key": "sk-mine", "tenant": "mine"}, {"key": "sk-other", "tenant": "other"}]
    home = homes()
    fleet = fleet_section(request, request.param, home)
    first, second = (
        Fleet(home, {"auth": {"api_keys": keys}, **sections}, fleet, wait_ms=1000, silent_ms=600_000) for _ in range(2)
    )
    for name, engine in zip(("one", "two"), engines):
        first.add_agent(name, engine)
    second.wait(lambda state: [one["health"] for one in state["agents"]] == ["READY", "READY"])
    yield first, second
    for orchestrator in (second, first):
        assert orchestrator.close() == 0, "".join(orchestrator.lines)


@pytest.fixture
def released(engines: list[Server]) -> Iterator[None]:
    """No engine is held any more."""
    yield
    for engine in engines:
        hold(engine, False)
