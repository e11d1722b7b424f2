"""Every query of the dashboards, evaluated by a real Prometheus that scraped a live server under load and faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import share_caches
from tests.e2e.server import free_port, wait_gone
from tests.e2e.up_server import Up
from tools.dashboards import DIRECTORY
from tools.tiny_gguf import SHAPES, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"),
]

RULES = Path(__file__).parents[2] / "configs" / "prometheus" / "rules.yml"
VALUES = {"$instance": ".+", "$model": ".+", "$__rate_interval": "5m"}
WAIT_S = 120.0
BODY = {"model": "tiny", "prompt": list(range(3, 90)), "max_tokens": 20, "ignore_eos": True}


class Prometheus:
    """A process that scrapes one server every 2 s."""

    def __init__(self, home: Path, target: int) -> None:
        self.port = free_port()
        home.mkdir()
        shutil.copy(RULES, home / "rules.yml")
        config = {
            "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": "starling", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
        }
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = (home / "log").open("wb")
        self.process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}"),
                *(f"--web.listen-address=127.0.0.1:{self.port}", "--enable-feature=exemplar-storage"),
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped a server whose tenants sent requests while its stages were killed."""
    home = tmp_path_factory.mktemp("dash")
    share_caches(home)
    model = {"name": "tiny", "path": str(write_model(home / "tiny.gguf", SHAPES["small"])), "kv_cache_mb": 16}
    with Up(home, {"models": [model], "logging": {"format": "json"}}) as server:
        one = Prometheus(home / "prometheus", server.port)
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
            one.close()


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
