"""Hosts whose links fail, and a store that dies, with real processes: `make fleet-hosts`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipeline.config.schema import DEMO_MODEL
from starling.cli import cli
from tests.e2e.conftest import share_caches
from tests.fleet.hosts_scenario import LEASE_S, SILENT_S

ROOT = Path(__file__).parents[2]
NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
PROGRAMS = ("unshare", "ip", "curl", "etcd")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.environ.get("STARLING_HOSTS") != "all", reason="takes minutes: make fleet-hosts")
def test_hosts_are_cut_off_and_come_back(tmp_path: Path) -> None:
    pytest.importorskip("aetcd", reason="aetcd is not installed: make fleet-peers")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if (
        missing
        or subprocess.run([*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True).returncode
    ):
        pytest.skip(f"needs namespaces, and {missing}")
    share_caches(tmp_path)
    config = {
        "models": [{"name": DEMO_MODEL, "kv_cache_mb": 128, "ranks": 1}],
        "fleet": {
            "agent": {"lease_ms": int(1000 * LEASE_S)},
            "orchestrator": {"silent_ms": int(1000 * SILENT_S)},
        },
    }
    (tmp_path / "starling.yaml").write_text(yaml.safe_dump(config))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("STARLING_", "LLM_ENGINE_"))}
    env |= {"STARLING_HOME": str(tmp_path), "STARLING_CONFIG": str(tmp_path / "starling.yaml"), "PYTHONPATH": str(ROOT)}
    published = CliRunner().invoke(cli, ["publish", DEMO_MODEL], env=env)
    assert published.exit_code == 0, published.output
    with (tmp_path / "output").open("w+") as output:
        command = [*NAMESPACES, sys.executable, "-m", "tests.fleet.hosts_scenario", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=output, timeout=800)
        output.seek(0)
        text = output.read()
    logs = "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, text[-4000:] + logs
    found = json.loads(text.splitlines()[-1])
    print(found)
    assert max(found["silent_pauses_s"]) < 5.0 + found["undisturbed_s"]
