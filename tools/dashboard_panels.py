"""What the dashboards are made of: panels, and expressions of Prometheus."""

from __future__ import annotations

from typing import NamedTuple

RATE = "[$__rate_interval]"
OF_SERVER = 'instance=~"$instance"'
OF_MODEL = f'{OF_SERVER}, model=~"$model"'


class Panel(NamedTuple):
    """One graph. `queries`: expression and legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""


class Dashboard(NamedTuple):
    """One file."""

    uid: str
    title: str
    rows: tuple[tuple[Panel, ...], ...]


def rate(metric: str, selector: str = OF_SERVER, by: str = "") -> str:
    """Sum of the rates of a counter."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{selector}}}{RATE}))"


def ratio(part: str, whole: str) -> str:
    """One expression divided by another."""
    return f"{part} / {whole}"


def quantile(q: float, metric: str, selector: str, by: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({metric}_bucket{{{selector}}}{RATE})))"


def quantiles(metric: str, selector: str, by: str, legend: str) -> tuple[tuple[str, str], ...]:
    """Median and 95th percentile."""
    return tuple((quantile(q, metric, selector, by), f"{legend} p{round(q * 100)}") for q in (0.5, 0.95))
