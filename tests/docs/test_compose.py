"""The compose file, brought up by podman-compose as docs/deploying.md has it; `make test-deploy`.

The file builds Starling's image. Where no registry answers, Prometheus's image is made of this machine's program, with
the user and the paths of the official one, and Grafana, which no package index has, is left out.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from pipeline.config.schema import DEMO_MODEL
from tests.docs.container_engine import Engine
from tests.docs.page import DEPLOY_S
from tests.e2e.server import ROOT
from tools.checks import markdown
from tools.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * DEPLOY_S),
    pytest.mark.skipif(not os.environ.get("STARLING_TEST_DEPLOY"), reason="takes minutes: make test-deploy"),
]
FILE = ROOT / "configs/container/compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]
KEY = {"Authorization": "Bearer sk-change-me"}  # of the page's command
MINUTE_S = 60
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # podman-compose is in this environment
_PROMETHEUS = """FROM {base}
COPY prometheus /bin/prometheus
RUN mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534
WORKDIR /prometheus
VOLUME /prometheus
ENTRYPOINT ["/bin/prometheus"]
"""


def request(
    port: int, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and decoded JSON of an answer; 0 and None while there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()


def wait_until(holds: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, holds
        time.sleep(0.5)


class Composition:
    """The services of the compose file, on ports of their own and with limits that this machine allows."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.ports = {name: free_port() for name in SERVICES}
        self.services = [name for name in SERVICES if self._has_image(name)]
        lines = ["services:"]
        for name, port in self.ports.items():
            inside = SERVICES[name]["ports"][0].rpartition(":")[2]
            lines += [f"  {name}:", f'    ports: !override ["127.0.0.1:{port}:{inside}"]']
            lines += [f"    ulimits: {json.dumps(engine.limits)}"] if engine.limits else []
        self._here = folder / "here.yaml"  # what is different on this machine
        self._here.write_text("\n".join(lines) + "\n")
        text = (ROOT / "docs/deploying.md").read_text()
        self.block = next(block.text for block in markdown.blocks(text) if block.info == "sh deploy podman-compose")

    def _has_image(self, name: str) -> bool:
        if "build" in SERVICES[name]:
            return True
        image = SERVICES[name]["image"]
        if self.engine.podman("pull", "--quiet", image, is_checked=False).returncode == 0:
            return True
        program = shutil.which(name)
        if program is None:
            return False
        context = self.engine.folder / name
        context.mkdir(exist_ok=True)
        shutil.copy(program, context)
        (context / "Containerfile").write_text(_PROMETHEUS.format(base=self.engine.base))
        self.engine.podman("build", "--tag", image, str(context))
        return True

    def run(self, command: str) -> None:
        """The page's lines with a command of podman-compose, for the services that have an image."""
        lines = [line for line in self.block.splitlines() if line.startswith("export ") or f" {command}" in line]
        text = "\n".join(lines).replace("compose.yaml", f"compose.yaml --file {self._here}")
        if command == "up":
            text += " " + " ".join(self.services)
        done = subprocess.run(
            ["bash", "-euxc", text],
            cwd=ROOT,
            env={**os.environ, **self.engine.environment, "PATH": PATH},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEPLOY_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.fixture
def composition(engine: Engine, tmp_path: Path) -> Iterator[Composition]:
    for program in ("podman-compose", "prometheus"):
        if not shutil.which(program, path=PATH):
            pytest.skip(f"not installed: {program}")
    if not engine.has_names:
        pytest.skip("containers do not find each other by name: netavark and aardvark-dns are not installed")
    if engine.podman("volume", "exists", "starling", is_checked=False).returncode == 0:
        # What the tests of the image have fetched and compiled.
        saved = tmp_path / "starling.tar"
        engine.podman("volume", "export", "starling", "--output", str(saved))
        engine.podman("volume", "create", "starling_starling")
        engine.podman("volume", "import", "starling_starling", str(saved))
        saved.unlink()
    composition = Composition(engine, tmp_path)
    try:
        yield composition
    finally:
        composition.run("down")


def test_the_services_run_together(composition: Composition) -> None:
    composition.run("up")
    engine, starling, prometheus = composition.engine, *(composition.ports[name] for name in ("starling", "prometheus"))
    wait_until(lambda: request(starling, "GET", "/ready")[0] == 200, DEPLOY_S)
    body = {"model": DEMO_MODEL, "prompt": "The sky is", "max_tokens": 8}
    assert request(starling, "POST", "/v1/completions", body)[0] == 401
    status, answer = request(starling, "POST", "/v1/completions", body, KEY)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    names = engine.podman("ps", "--format", "{{.Names}}").stdout.split()
    assert len(names) == len(composition.services)
    [name] = [name for name in names if name.replace("-", "_") == "starling_starling_1"]
    engine.check_health(name)
    [found] = json.loads(engine.podman("inspect", name).stdout)
    assert found["HostConfig"]["ReadonlyRootfs"]
    assert found["EffectiveCaps"] in (None, [])
    assert "no-new-privileges" in str(found["HostConfig"]["SecurityOpt"])

    def query(path: str, **arguments: str) -> Any:
        status, answer = request(prometheus, "GET", f"/api/v1/{path}?{urlencode(arguments)}")
        return answer["data"] if status == 200 else None

    def value(expression: str) -> float:
        found = query("query", query=expression)
        return float(found["result"][0]["value"][1]) if found and found["result"] else 0.0

    # It scrapes the service by its name, with a key that names the tenants.
    wait_until(lambda: value('up{job="starling"}') == 1, MINUTE_S)
    wait_until(lambda: value("sum(starling_requests_total)") >= 1, MINUTE_S)
    wait_until(lambda: value('sum(starling_tenant_requests_total{tenant=~"key-.+"})') >= 1, MINUTE_S)
    rules = yaml.safe_load((ROOT / "configs/prometheus/rules.yml").read_text())["groups"]
    assert {group["name"] for group in query("rules")["groups"]} == {group["name"] for group in rules}

    composition.run("down")
    assert engine.podman("ps", "--all", "--quiet").stdout.split() == []
    engine.podman("volume", "exists", "starling_starling")
