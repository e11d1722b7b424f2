"""Plots a dashboard's own queries on a Prometheus server's data: `python -m tools.dashboard_plots URL DIRECTORY`.

One PNG for each dashboard, for documentation and for a look without Grafana.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.dashboards import DASHBOARDS, Dashboard, Panel

COLUMNS = 3
POINTS = 120  # of a line
MAX_LINES = 10  # of a panel


def fetch(url: str, expression: str, end: float, span_s: float) -> list[dict[str, Any]]:
    """The series of an expression with its variables replaced, over the last `span_s`."""
    step = max(1, round(span_s / POINTS))
    for name in ("$instance", "$model", "$orchestrator", "$agent"):
        expression = expression.replace(name, ".+")
    expression = expression.replace("$__rate_interval", f"{max(5, 5 * step)}s")
    query = urllib.parse.urlencode({"query": expression, "start": end - span_s, "end": end, "step": step})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}", timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def legend(template: str, labels: Mapping[str, str]) -> str:
    """The legend of a series, as Grafana makes it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def plot(url: str, dashboard: Dashboard, path: Path, end: float, span_s: float) -> None:
    """Write one dashboard."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(dashboard.rows)
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(6 * COLUMNS, 3.2 * rows), squeeze=False, layout="constrained"
    )
    figure.suptitle(dashboard.title)
    for row, panels in zip(axes, dashboard.rows):
        for axis in row[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(row, panels):
            _draw(axis, url, panel, end, span_s)
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def _draw(axis: Any, url: str, panel: Panel, end: float, span_s: float) -> None:
    lines = []
    for expression, template in panel.queries:
        for series in fetch(url, expression, end, span_s):
            points = [(float(at) - end + span_s, float(value)) for at, value in series["values"]]
            points = [point for point in points if math.isfinite(point[1])]
            if points:
                lines.append((max(value for _, value in points), legend(template, series["metric"]), points))
    lines.sort(key=lambda line: line[0], reverse=True)
    for _, name, points in lines[:MAX_LINES]:
        axis.plot(*zip(*points), label=name, linewidth=1.2)
    axis.set_title(f"{panel.title} ({panel.unit})" if panel.unit != "short" else panel.title, fontsize=10)
    axis.set_xlim(0, span_s)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("s", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    if any(name for _, name, _ in lines[:MAX_LINES]):
        axis.legend(fontsize=7, loc="upper left")


def main() -> None:
    """Write all dashboards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of Prometheus, as http://127.0.0.1:9090")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="until now (default 300)")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    end = time.time()
    for dashboard in DASHBOARDS:
        name = dashboard.uid.removeprefix("starling-")
        plot(arguments.url.rstrip("/"), dashboard, arguments.directory / f"{name}.png", end, arguments.seconds)


if __name__ == "__main__":
    main()
