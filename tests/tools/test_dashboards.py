"""The Grafana dashboards: written by their tool, of metrics and labels that exist, and provisioned."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.tools.test_metric_names import ALL_FAMILIES
from tools.dashboards import DASHBOARDS, DATASOURCE, DIRECTORY, Dashboard, render

GRAFANA = DIRECTORY.parent


def test_the_files_are_what_the_tool_writes() -> None:
    """`python -m tools.dashboards` writes them."""
    names = {one.uid.removeprefix("starling-"): one for one in DASHBOARDS}
    assert {path.stem for path in DIRECTORY.iterdir()} == set(names)
    assert set(names) == {"overview", "model", "tenants", "stages", "capacity", "fleet"}
    for name, dashboard in names.items():
        assert json.loads((DIRECTORY / f"{name}.json").read_text()) == render(dashboard)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_queries_use_metrics_labels_and_variables_that_exist(dashboard: Dashboard) -> None:
    shown = render(dashboard)
    variables = {one["name"] for one in shown["templating"]["list"]}
    used = set()
    for panel in shown["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            expression = target["expr"]
            used |= set(re.findall(r"\$(\w+)", expression)) - {"__rate_interval"}
            labels: set[str] = set()
            for name, matcher in re.findall(r"\b(starling_\w+)\{([^}]*)\}", expression):
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                family = ALL_FAMILIES.get(name) or ALL_FAMILIES[base]
                assert (family.kind == "histogram") == (family.name != name), f"{name} is a {family.kind}"
                known = {*family.labels, "instance"}
                assert set(re.findall(r"(\w+)[=!]", matcher)) <= known, f"{name}{{{matcher}}}"
                labels |= known
                # A counter is shown as a rate, a gauge as it is.
                around = expression[: expression.index(name)][-40:]
                assert (family.kind != "gauge") == bool(re.search(r"(rate|increase)\($", around)), expression
            grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
            assert grouped - {"le"} <= labels, expression
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped, expression
    assert used == variables


def test_the_data_source_and_the_files_are_provisioned() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["uid"], source["type"]) == (DATASOURCE["uid"], DATASOURCE["type"])
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/starling.yml").read_text())["providers"]
    compose = yaml.safe_load((GRAFANA.parent / "container/compose.yaml").read_text())["services"]
    mounts = dict(reversed(mount.removesuffix(":ro").split(":")) for mount in compose["grafana"]["volumes"])
    here = GRAFANA.parent / "container"
    assert (here / mounts[provider["options"]["path"]]).resolve() == DIRECTORY
    assert (here / mounts["/etc/grafana/provisioning"]).resolve() == GRAFANA / "provisioning"
    assert source["url"] == "http://prometheus:9090"
    scrape = here / "prometheus.yml"
    config = yaml.safe_load(scrape.read_text())
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["starling:8080"]}]
    prometheus = [mount.removesuffix(":ro").split(":") for mount in compose["prometheus"]["volumes"]]
    files = {target: (here / source).resolve() for source, target in prometheus if source.startswith(".")}
    assert files["/etc/prometheus/prometheus.yml"] == scrape
    assert files["/etc/prometheus/rules.yml"] == GRAFANA.parent / "prometheus" / "rules.yml"
