"""The documented metrics, those of the rules, and the table: the same names, kinds, labels and texts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.fleet.bodies import HeartbeatResponse
from pipeline.observe.metric_families import FAMILIES
from stages.agent.metrics import AgentMetrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "configs" / "prometheus"


def documented(page: str = "metrics.md") -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Kind, labels and meaning of each name on a page."""
    rows = re.findall(r"^\| `(starling_\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", (ROOT / "docs" / page).read_text(), re.M)
    assert len(rows) == len({row[0] for row in rows})
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def test_the_page_lists_every_metric() -> None:
    assert documented() == {name: (one.kind, one.labels, one.help) for name, one in FAMILIES.items()}


def test_the_page_of_the_fleet_lists_every_metric_of_agents() -> None:
    report = HeartbeatResponse(agent_id="one", incarnation="1", state="IDLE")
    text = AgentMetrics(lambda: 0.0).render(report, 0).decode()
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    texts = dict(re.findall(r"^# HELP (\w+) (.+)$", text, re.M))
    found = {name: (kind, meaning) for name, (kind, _, meaning) in documented("fleet.md").items()}
    assert found == {name: (kind, texts[name]) for name, kind in kinds.items()}


def test_rules_use_metrics_and_labels_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        for name in re.findall(r"\bstarling:[\w:]+", rule["expr"]):
            assert name in recorded, name
        for name, matcher in re.findall(r"\b(starling_\w+)(\{[^}]*\})?", rule["expr"]):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            family = FAMILIES.get(name) or FAMILIES[base]
            assert (family.kind == "histogram") == (family.name != name), f"{name} is a {family.kind}"
            assert set(re.findall(r"(\w+)=", matcher)) <= set(family.labels), f"{name}{matcher}"


def test_every_alert_says_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 8
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "action"}


def test_every_alert_is_shown_to_fire_and_to_resolve() -> None:
    """In the unit tests of the rules: at one time it is due, at another it is not."""
    content = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())
    checks = [check for test in content["tests"] for check in test.get("alert_rule_test", ())]
    fires = {check["alertname"] for check in checks if check.get("exp_alerts")}
    rests = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert fires == alerts
    assert rests == alerts


@pytest.mark.parametrize("command", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr
