"""Every query of the dashboards, evaluated by a real Prometheus that scraped a live server under load and faults."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from pipeline.config.schema import Config
from tests.e2e.conftest import share_caches
from tests.e2e.server import wait_gone
from tests.e2e.up_server import Up
from tools.alerts.faults import ServerFaults
from tools.alerts.prometheus import MISSING, Prometheus, is_installed
from tools.alerts.rules import shortened
from tools.alerts.watch import AlertError, Watch
from tools.dashboards import DIRECTORY
from tools.tiny_gguf import SHAPES, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason=MISSING),
]

VALUES = {"$instance": ".+", "$model": ".+", "$__rate_interval": "5m"}
ALERTS_FACTOR = 20.0
WAIT_S = 120.0
BODY = {"model": "tiny", "prompt": list(range(3, 90)), "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    home = tmp_path_factory.mktemp("dash")
    share_caches(home)
    model = {"name": "tiny", "path": str(write_model(home / "tiny.gguf", SHAPES["small"])), "kv_cache_mb": 16}
    with Up(home, {"models": [model], "logging": {"format": "json"}}) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: Up) -> Iterator[Prometheus]:
    """It has scraped a server whose tenants sent requests while its stages were killed."""
    recording, _ = shortened(1)["groups"]
    _, alerts = shortened(ALERTS_FACTOR)["groups"]
    with Prometheus(server.home / "prometheus", server.port, {"groups": [recording, alerts]}) as one:
        over = threading.Event()
        clients = [threading.Thread(target=_load, args=(server, over)) for _ in range(2)]
        try:
            for client in clients:
                client.start()
            _wait(one, "sum(starling_tokens_generated_total) > 100")
            for stage in ("scheduler", "tokenizer"):
                pid = server.pid_of(stage)
                os.kill(pid, signal.SIGKILL)
                assert wait_gone(pid)
                _wait(one, f'sum(starling_stage_restarts_total{{stage="{stage}"}}) > 0')
                _wait(one, "min(starling_stage_ready) == 1")
            _wait(one, "count(count_over_time(starling_step_seconds_count[5m]) > 5)")
            yield one
        finally:
            over.set()
            for client in clients:
                client.join()


def _load(server: Up, over: threading.Event) -> None:
    number = 0
    while not over.is_set():
        number += 1
        try:
            server.request("POST", "/v1/completions", BODY if number % 5 else {**BODY, "max_tokens": -1})
        except OSError:
            pass  # the gateway has not been killed, but connections may be cut


def _wait(prometheus: Prometheus, expression: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if prometheus.query(expression):
                return
        except OSError:
            assert prometheus.process.poll() is None
        assert time.monotonic() < deadline, expression
        time.sleep(0.2)


def queries() -> list[tuple[str, str, str]]:
    """Dashboard, panel and expression, with values for the variables."""
    found = []
    for path in sorted(DIRECTORY.iterdir()):
        if path.stem == "fleet":  # of other processes: tests/fleet/test_dashboard.py
            continue
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in VALUES.items():
                    expression = expression.replace(name, value)
                found.append((path.stem, panel["title"], expression))
    return found


def test_every_query_of_every_panel_has_data(prometheus: Prometheus) -> None:
    assert len(queries()) > 40
    for _, _, expression in queries():
        _wait(
            prometheus, expression
        )  # a scrape that took too long leaves the gauges without a value until the next one


def test_load_and_faults_are_in_the_data(prometheus: Prometheus) -> None:
    """What was done to the server shows: the queries measure, and are not only answered."""
    shown = {panel: prometheus.query(expression) for _, panel, expression in queries()}
    restarts = {one["metric"]["stage"]: float(one["value"][1]) for one in shown["Restarts"]}
    assert min(restarts["scheduler"], restarts["tokenizer"]) > 0
    (tokens,) = prometheus.query("sum(rate(starling_tokens_generated_total[5m]))")
    assert float(tokens["value"][1]) > 0
    refused = {one["metric"].get("code"): float(one["value"][1]) for one in shown["Refusals"]}
    assert refused["INVALID_REQUEST"] > 0
    # Recorded rules and exemplars are there, too.
    assert prometheus.query("starling:output_tokens:rate1m")
    now = time.time()
    name = "starling_time_to_first_token_seconds_bucket"
    (series,) = prometheus.get("query_exemplars", query=name, start=str(now - 600), end=str(now + 60))[:1]
    assert re.fullmatch(r"req-[0-9a-f]+", series["exemplars"][0]["labels"]["request_id"])


def test_an_alert_fires_while_its_fault_lasts(server: Up, prometheus: Prometheus) -> None:
    """One of those that `make alerts` checks: a stage that hangs, and that its supervisor does not end."""
    watch = Watch(prometheus)
    with pytest.raises(AlertError, match="did not fire"):  # nothing is wrong
        watch.wait_firing(["StarlingStageNotReady"], 3)
    config = msgspec.convert({"server": {"run_dir": str(server.home / "run")}}, Config)
    faults = ServerFaults(server.port, server.home / "run", config)
    watch.due.add("StarlingErrors")  # of the requests that find no tokenizer
    try:
        faults.freeze("tokenizer")
        watch.wait_firing(["StarlingStageNotReady"], WAIT_S)
        with pytest.raises(AlertError, match="without a fault"):
            Watch(prometheus).wait_resolved([], 0)
    finally:
        faults.close()
    watch.wait_resolved(["StarlingStageNotReady"], WAIT_S)
