"""The systemd units: one for each stage, with watchdog, limits and hardening; install.sh inserts the path."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.config.schema import ConstraintsConfig
from starling.cli.stage import STAGES

UNITS = Path(__file__).parents[2] / "configs" / "systemd"


def unit(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    assert parser["Install"]["WantedBy"] == "starling.target"
    return parser["Service"]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_unit(stage: str) -> None:
    service = unit(UNITS / f"starling-{stage}.service")
    # Worker groups start and end with models: their unit runs the supervisor.
    how = "supervise" if stage == "worker" else "stage"
    assert service["ExecStart"] == f"@PREFIX@/.venv/bin/starling {how} {stage}"
    expected = {
        "Type": "notify",
        "Restart": "on-failure",
        "NoNewPrivileges": "yes",
        "LimitCORE": "0",
        "ProtectSystem": "strict",
        "CapabilityBoundingSet": "",
        "KillMode": "mixed",
        "User": "starling",
    }
    assert {name: service[name] for name in expected} == expected
    assert service["WatchdogSec"]
    assert re.fullmatch(r"\d+[%MG]", service["MemoryMax"])
    # Kernels are compiled at run time.
    assert "MemoryDenyWriteExecute" not in service


def test_they_are_installed_for_a_checkout(tmp_path: Path) -> None:
    shutil.copytree(UNITS, tmp_path / "configs" / "systemd")
    install = [str(tmp_path / "configs" / "systemd" / "install.sh"), str(tmp_path / "out")]
    refused = subprocess.run(install, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "run 'make setup' first" in refused.stderr
    program = tmp_path / ".venv" / "bin" / "starling"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    subprocess.run(install, check=True, capture_output=True)
    written = sorted((tmp_path / "out").iterdir())
    names = {f"starling-{stage}.service" for stage in STAGES} | {"starling.target"}
    assert {path.name for path in written} == names
    for path in written:
        assert "@PREFIX@" not in path.read_text()
    assert unit(tmp_path / "out" / "starling-kv.service")["ExecStart"] == f"{program} stage kv"


def test_what_the_documentation_does_as_the_units_user_can_be_done() -> None:
    """The user's home exists before a unit has made it, and the models that are prepared are the configured ones."""
    script = (UNITS / "install.sh").read_text()
    made = "install -d -o starling -g starling -m 0700 /var/lib/starling"
    assert made in script
    assert 'install -D -g starling -m 0640 "$configuration" "$configured"' in script  # API keys may be in it
    assert script.index("useradd") < script.index(made) < script.index("systemctl daemon-reload")
    page = (UNITS.parents[1] / "docs" / "operating.md").read_text()
    service = unit(UNITS / "starling-worker.service")
    home, configured = "STARLING_HOME=/var/lib/starling", "STARLING_CONFIG=/etc/starling/starling.yaml"
    assert configured in (UNITS / "starling-worker.service").read_text()
    assert service["StateDirectory"] == "starling"
    assert f"sudo -u starling env {home} {configured} .venv/bin/starling prepare\n" in page
    assert f"sudo -u starling env {home} STARLING_CONFIG=$configured $prefix/.venv/bin/starling prepare\n" in script


def test_a_helper_that_takes_too_much_memory_does_not_end_its_stage() -> None:
    for stage in ("gateway", "scheduler"):
        assert unit(UNITS / f"starling-{stage}.service")["OOMPolicy"] == "continue"
    gigabytes = int(unit(UNITS / "starling-scheduler.service")["MemoryMax"].removesuffix("G"))
    assert gigabytes << 10 > 2 * ConstraintsConfig().memory_mb, "the two helper processes, and the scheduler"
