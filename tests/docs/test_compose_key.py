"""The command of the compose file and its Prometheus, run without containers: the scrape has the tenants' names."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import share_caches
from tests.e2e.server import POLL_S, ROOT
from tests.e2e.up_server import Up
from tools.alerts.prometheus import MISSING, Prometheus, is_installed
from tools.tiny_gguf import SHAPES, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason=MISSING),
]
CONTAINER = ROOT / "configs/container"
SERVICES: dict[str, Any] = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"]
CLIENT = "sk-client"
BODY = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 2}
WAIT_S = 120.0


def mounted(service: str, volume: str) -> str:
    """Where a service has a volume."""
    mounts = (mount.split(":") for mount in SERVICES[service]["volumes"])
    return next(parts[1] for parts in mounts if parts[0] == volume)


def composed(home: Path, folder: Path) -> Up:
    """The service as the compose file starts it; `folder` is in the place of the volume with the key."""
    model = {"name": "tiny", "path": str(home / "tiny.gguf"), "kv_cache_mb": 16}
    server = Up(home, {"models": [model]}, {"STARLING_AUTH__API_KEYS": CLIENT})
    command = [part.replace("$$", "$") for part in SERVICES["starling"]["command"]]
    server.command = [part.replace(mounted("starling", "scraper"), str(folder)) for part in command]
    return server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.strip()}"}


def tenants(prometheus: Prometheus) -> set[str]:
    """Those with output."""
    deadline = time.monotonic() + WAIT_S
    while not (found := prometheus.query('starling_tenant_request_tokens_total{kind="output"} > 0')):
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    return {one["metric"]["tenant"] for one in found}


def test_prometheus_scrapes_with_a_key_that_the_server_has_made(tmp_path: Path) -> None:
    share_caches(tmp_path)
    write_model(tmp_path / "tiny.gguf", SHAPES["small"])
    folder = tmp_path / "scraper"
    folder.mkdir()
    key = folder / "key"
    (scrape,) = yaml.safe_load((CONTAINER / "prometheus.yml").read_text())["scrape_configs"]
    text = json.dumps(scrape["authorization"])
    authorization = json.loads(text.replace(mounted("prometheus", "scraper"), str(folder)))
    assert authorization == {"credentials_file": str(key)}
    with composed(tmp_path, folder) as server:
        assert [path.name for path in folder.iterdir()] == ["key"]
        assert key.stat().st_mode & stat.S_IROTH  # Prometheus has another user
        first = key.read_text()
        assert server.request("POST", "/v1/completions", BODY, bearer(first))[0] == 403
        assert server.request("POST", "/v1/completions", BODY, bearer(CLIENT))[0] == 200
        home = tmp_path / "prometheus"
        with Prometheus(home, server.port, {"groups": []}, authorization=authorization) as prometheus:
            (tenant,) = tenants(prometheus)
            assert tenant.startswith("key-")  # not the sum of all
    # A container that is made anew has the volumes: it keeps the key. Without the key's volume it replaces the key.
    with composed(tmp_path, folder):
        assert key.read_text() == first
    key.unlink()
    with composed(tmp_path, folder) as server:
        assert server.request("GET", "/metrics", None, bearer(first))[0] == 401
        assert server.request("GET", "/metrics", None, bearer(key.read_text()))[0] == 200
