"""The benchmark of tracing measures each way, and sends what it measures."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")


def test_each_way_has_a_figure() -> None:
    from tools.bench.tracing_cost import main

    result = CliRunner().invoke(main, ["--rounds", "1"], catch_exceptions=False)
    figures = json.loads(result.output.splitlines()[-1])
    assert 0 < figures["off_us_per_request"] < min(figures["timelines_us_per_request"], figures["otlp_us_per_request"])
    assert figures["thread_us_per_request"] > 0
