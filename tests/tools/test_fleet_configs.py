"""The worked example of a fleet: each host's file is a valid configuration, and the units run the two commands."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from pipeline.config.load import load
from starling.cli import cli

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "fleet"
COMMANDS = ("orchestrator", "agent")


def test_the_hosts_are_one_fleet() -> None:
    configs = [load(path, {}) for path in sorted(FOLDER.glob("host-*.yaml"))]
    assert len(configs) == 3
    assert len({(one.fleet.store, one.fleet.token, one.fleet.blobs) for one in configs}) == 1
    assert configs[0].fleet.store.startswith("etcd://") and configs[0].fleet.blobs.startswith("s3://")
    assert configs[0].fleet.orchestrator.host == "10.0.0.1" and any(key.admin for key in configs[0].auth.api_keys)
    agents = [one.fleet.agent for one in configs[1:]]
    assert len({agent.id for agent in agents}) == len({agent.host for agent in agents}) == 2
    assert all(one.models[0].path == f"catalog:{one.models[0].name}" for one in configs[1:])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_units_run_the_commands(command: str, tmp_path: Path) -> None:
    for folder in ("systemd", "fleet"):
        shutil.copytree(ROOT / "configs" / folder, tmp_path / "configs" / folder)
    program = tmp_path / ".venv" / "bin" / "starling"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    install = [str(tmp_path / "configs" / "systemd" / "install.sh"), str(tmp_path / "out")]
    subprocess.run(install, check=True, capture_output=True, env={**os.environ, "UNITS": "fleet"})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"starling-{one}.service" for one in COMMANDS}
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    text = (tmp_path / "out" / f"starling-{command}.service").read_text()
    parser.read_string(text)
    service = parser["Service"]
    assert service["ExecStart"] == f"{program} {command}" and "@PREFIX@" not in text
    expected = {
        "Type": "notify",
        "Restart": "on-failure",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "LimitCORE": "0",
    }
    assert {name: service[name] for name in expected} == expected
    assert service["WatchdogSec"]
    assert cli.get_command(click.Context(cli), command) is not None
    lines = (FOLDER / "Procfile").read_text().splitlines()
    assert any(line.startswith(f"{command}: ") and line.endswith(f"exec starling {command}") for line in lines)
