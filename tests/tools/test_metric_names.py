"""The documented metrics, those of the rules, and the table: the same names, kinds, labels and texts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from pipeline.config.load import load
from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.observe.metric_families import FAMILIES, Family
from stages.agent.metrics import AgentMetrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "configs" / "prometheus"
FILES = ("rules.yml", "fleet_rules.yml")


def documented(page: str = "metrics.md") -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Kind, labels and meaning of each name on a page."""
    rows = re.findall(r"^\| `(starling_\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", (ROOT / "docs" / page).read_text(), re.M)
    assert len(rows) == len({row[0] for row in rows})
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}


# Those of agents, too, which have a registry of their own.
ALL_FAMILIES = {
    **FAMILIES,
    **{
        name: Family(name, cast(Any, kind), text, labels)
        for name, (kind, labels, text) in documented("fleet.md").items()
    },
}


def rules(file: str = "rules.yml") -> list[dict[str, Any]]:
    content = yaml.safe_load((PROMETHEUS / file).read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def test_the_page_lists_every_metric() -> None:
    assert documented() == {name: (one.kind, one.labels, one.help) for name, one in FAMILIES.items()}


def test_the_page_of_the_fleet_lists_every_metric_of_agents() -> None:
    report = HeartbeatResponse(agent_id="one", incarnation="1", state="IDLE", gpu_utilization=0.5, gpu_memory_free=1)
    text = AgentMetrics(lambda: 0.0).render(report, 0).decode()
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    texts = dict(re.findall(r"^# HELP (\w+) (.+)$", text, re.M))
    found = {name: (kind, meaning) for name, (kind, _, meaning) in documented("fleet.md").items()}
    assert found == {name: (kind, texts[name]) for name, kind in kinds.items()}


@pytest.mark.parametrize("file", FILES)
def test_rules_use_metrics_and_labels_that_exist(file: str) -> None:
    recorded = {rule["record"] for rule in rules(file) if "record" in rule}
    for rule in rules(file):
        for name in re.findall(r"\bstarling:[\w:]+", rule["expr"]):
            assert name in recorded, name
        for name, matcher in re.findall(r"\b(starling_\w+)(\{[^}]*\})?", rule["expr"]):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            family = ALL_FAMILIES.get(name) or ALL_FAMILIES[base]
            assert (family.kind == "histogram") == (family.name != name), f"{name} is a {family.kind}"
            assert set(re.findall(r"(\w+)=", matcher)) <= set(family.labels), f"{name}{matcher}"


@pytest.mark.parametrize("file", FILES)
def test_every_alert_says_what_to_do(file: str) -> None:
    alerts = [rule for rule in rules(file) if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 8
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "action"}


@pytest.mark.parametrize("file", FILES)
def test_every_alert_is_shown_to_fire_and_to_resolve(file: str) -> None:
    """In the unit tests of the rules: at one time it is due, at another it is not."""
    content = yaml.safe_load((PROMETHEUS / file.replace(".yml", "_test.yml")).read_text())
    checks = [check for test in content["tests"] for check in test.get("alert_rule_test", ())]
    fires = {check["alertname"] for check in checks if check.get("exp_alerts")}
    rests = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    alerts = {rule["alert"] for rule in rules(file) if "alert" in rule}
    assert fires == alerts
    assert rests == alerts


def test_the_configuration_of_a_fleet_has_its_rules_and_its_hosts() -> None:
    config = yaml.safe_load((PROMETHEUS / "fleet.yml").read_text())
    assert config["rule_files"] == list(FILES)
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    named = {name for rule in rules("fleet_rules.yml") for name in re.findall(r'job="([\w-]+)"', rule["expr"])}
    assert named == set(jobs) == {"starling-orchestrators", "starling-agents"}
    hosts = [load(path, {}).fleet for path in sorted((ROOT / "configs" / "fleet").glob("host-*.yaml"))]
    front, agents = hosts[0].orchestrator, [one.agent for one in hosts[1:]]
    assert jobs["starling-orchestrators"] == [f"{front.host}:{front.port}"]
    assert jobs["starling-agents"] == [f"{agent.host}:{agent.port}" for agent in agents]


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "config", "--syntax-only", "fleet.yml"),  # there is no file with the token here
        ("check", "rules", "fleet_rules.yml"),
        ("test", "rules", "rules_test.yml"),
        ("test", "rules", "fleet_rules_test.yml"),
    ],
)
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr
