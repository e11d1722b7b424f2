"""The launcher for Ray, on a real cluster: in a network namespace with nothing but `lo`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import FleetConfig
from pipeline.errors import ConfigError
from starling.launchers.ray_actor import AgentHolder, environment_of
from starling.launchers.ray_cluster import RayLauncher

ROOT = Path(__file__).parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None
NAMESPACES = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
# A dead node is noticed after 3 s instead of a minute.
HEALTH = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 1000, "failure_threshold": 3}


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_remedy_is_named() -> None:
    with pytest.raises(ConfigError, match="the launcher ray needs Ray: "):
        RayLauncher(FleetConfig())


needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: make fleet-ray")


def run(module: str, home: Path, **environment: str) -> Any:
    """Run a program of this folder in namespaces of its own. Returns the value of its last line."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    # Short: the paths of Ray's sockets are longer than they may be otherwise.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "STARLING_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_TMPDIR": folder,
            **environment,
        }
        command = [*NAMESPACES, sys.executable, "-m", f"tests.fleet.{module}", folder]
        with (home / "output").open("w+") as output:
            done = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=output, timeout=800)
            output.seek(0)
            text = output.read()
    assert done.returncode == 0, text[-8000:]
    return json.loads(text.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_ray
def test_agents_run_on_the_nodes_of_a_cluster(tmp_path: Path) -> None:
    environment = {
        **{f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a" * 32,
        "RAY_ADDRESS": "127.0.0.1:6379",
        "STARLING_FLEET__AGENT__LEASE_MS": "3000",
    }
    found = run("ray_scenario", tmp_path, **environment)
    assert {found["first"], found["moved"]} == {"127.0.0.2", "127.0.0.3"}
    assert found["lines"] >= 1
    assert found["refused"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_ray
def test_the_documented_commands_run(tmp_path: Path) -> None:
    (agent,) = run("ray_documented", tmp_path)
    assert agent["agent_id"] == "ray-agent-1"


def test_an_agent_listens_where_the_configuration_of_its_node_says(tmp_path: Path) -> None:
    name, settings = "STARLING_FLEET__AGENT__HOST", {"STARLING_FLEET__BLOBS": "/blobs"}
    file = tmp_path / "starling.yaml"
    env = {"STARLING_CONFIG": str(file)}
    file.write_text("fleet: {agent: {max_models: 2}}")
    assert environment_of("10.0.0.7", settings, env) == {**env, **settings, name: "10.0.0.7"}
    file.write_text("fleet: {agent: {host: 192.168.1.7}}")
    assert environment_of("10.0.0.7", settings, env) == {**env, **settings}
    file.write_text("fleet: {agent: {host: 5}}")  # the agent reports it
    assert environment_of("10.0.0.7", settings, env)[name] == "10.0.0.7"
    file.write_text("")
    env[name] = "192.168.1.8"
    assert environment_of("10.0.0.7", settings, env)[name] == "192.168.1.8"


def test_a_log_is_read_in_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    holder = object.__new__(AgentHolder)
    holder._agent_id = "ray-agent-1"
    assert holder.log(5) == (b"", 0)
    path = tmp_path / "logs" / "agents" / "ray-agent-1.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"one\ntwo\nthree\nfo")
    assert holder.log(2) == (b"two\nthree\n", 14)
    assert holder.log(0) == (b"", 14)
    assert holder.log_after(14) == (b"", 14)
    with path.open("ab") as file:
        file.write(b"ur\n")
    assert holder.log_after(14) == (b"four\n", 19)
    path.write_bytes(b"five\n")  # a new file after a rotation
    assert holder.log_after(19) == (b"five\n", 5)
