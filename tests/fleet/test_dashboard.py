"""The dashboard and the alerts of a fleet, evaluated by a real Prometheus that scrapes its processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.fleet.token import for_metrics
from tests.fleet.two_agents import MINE, Hosts
from tools.alerts.prometheus import MISSING, Prometheus, is_installed
from tools.alerts.rules import RULES, shortened
from tools.alerts.watch import Watch
from tools.dashboards import DIRECTORY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason=MISSING)]

VALUES = {"$orchestrator": ".+", "$agent": ".+", "$__rate_interval": "5m"}
FACTOR = 20.0
WAIT_S = 120.0
BODY = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("fd")) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    jobs = {
        "starling-orchestrators": [hosts.fleet.port],
        "starling-agents": [urlsplit(agent.url).port or 0 for agent in hosts.agents.values()],
    }
    scraper = {"credentials": for_metrics(hosts.fleet.secret)}
    home: Path = tmp_path_factory.mktemp("p") / "prometheus"
    rules = shortened(FACTOR, RULES.with_name("fleet_rules.yml"))
    with Prometheus(home, jobs, rules, authorization=scraper) as one:
        yield one


def _wait(prometheus: Prometheus, fleet: Hosts, expression: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not prometheus.query(expression):
        assert time.monotonic() < deadline, expression
        for is_stream in (False, True):
            assert fleet.fleet.post("/v1/generate", {**BODY, "stream": is_stream}, MINE).status == 200
        time.sleep(0.2)


def test_every_query_of_every_panel_has_data(hosts: Hosts, prometheus: Prometheus) -> None:
    panels = json.loads((DIRECTORY / "fleet.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        for name, value in VALUES.items():
            expression = expression.replace(name, value)
        _wait(prometheus, hosts, expression)
    # What was done shows.
    _wait(prometheus, hosts, "sum(rate(starling_requests_total[5m])) > 0")
    assert prometheus.query('starling_fleet_agents{health="ready"} == 2')
    assert prometheus.query("starling_fleet_leader == 1") and prometheus.query("starling_fleet_store_up == 1")
    assert len(prometheus.query('starling_agent_model_ready{model="tiny"} == 1')) == 2
    assert not prometheus.firing()


def test_an_agent_that_dies_is_reported(hosts: Hosts, prometheus: Prometheus) -> None:
    watch = Watch(prometheus)
    watch.due.update(("StarlingAgentsSilent", "StarlingAgentsLost"))
    hosts.agents["two"].stop()
    watch.wait_firing(["StarlingAgentDown", "StarlingAgentsLost"], WAIT_S)
