"""OpenMetrics with exemplars for scrapers that prefer it; the text format for all others, as before."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from pipeline.observe.exemplars import MAX_SERIES, Exemplars, Source, accepts_open_metrics
from pipeline.observe.exposition import CONTENT_TYPE, OPEN_METRICS_TYPE
from tests.gateway.http_client import Answer
from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
NAMES = {
    "starling_request_duration_seconds": {"endpoint": "/v1/completions"},
    "starling_time_to_first_token_seconds": {"model": MODEL},
    "starling_time_per_output_token_seconds": {"model": MODEL},
    "starling_inter_token_seconds": {"model": MODEL},
}
BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 12, "seed": 1, "ignore_eos": True}


def exemplars_of(text: str) -> dict[str, list[dict[str, str]]]:
    """The labels of all exemplars of each of `NAMES`, which lie in their buckets."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.exemplar is None:
                continue
            assert sample.name == f"{family.name}_bucket"
            assert {**NAMES[family.name], "le": sample.labels["le"]} == sample.labels
            assert sample.exemplar.value <= float(sample.labels["le"])
            found.setdefault(family.name, []).append(dict(sample.exemplar.labels))
    return found


def scraped(server: Server, key: dict[str, str] | None = None) -> Answer:
    """A scrape that has the exemplars of a request; its duration is known after its response."""
    while True:
        answer = server.get("/metrics", {"Accept": PROMETHEUS, **(key or {})})
        if len(exemplars_of(answer.body.decode())) == len(NAMES):
            return answer


def test_a_scraper_that_prefers_it_gets_exemplars(server: Server) -> None:
    request_id = server.post("/v1/completions", BODY).headers["X-Starling-Request"]
    answer = scraped(server)
    assert answer.headers["Content-Type"] == OPEN_METRICS_TYPE
    assert exemplars_of(answer.body.decode()) == {name: [{"request_id": request_id}] for name in NAMES}
    # The text format has none; both have the same series.
    for accept in ({}, {"Accept": "text/plain"}, {"Accept": "*/*"}, {"Accept": "application/openmetrics-text;q=0"}):
        plain = server.get("/metrics", accept)
        assert plain.headers["Content-Type"] == CONTENT_TYPE
        assert "# EOF" not in plain.body.decode()
        assert request_id not in plain.body.decode()
    series = {(s.name, *s.labels.items()) for f in plain_families(plain.body.decode()) for s in f.samples}
    text = server.get("/metrics", {"Accept": PROMETHEUS}).body.decode()
    assert {(s.name, *s.labels.items()) for f in text_string_to_metric_families(text) for s in f.samples} == series


def test_with_tracing_they_name_the_trace(make_server: MakeServer) -> None:
    pytest.importorskip("opentelemetry.sdk")
    # No collector listens there, which costs the traces and nothing else.
    keys = [{"key": "sk-client"}, {"key": "sk-scraper", "admin": True}]
    server = make_server(tracing={"otlp": {"endpoint": "http://127.0.0.1:9"}}, auth={"api_keys": keys})
    server.wait_ready()
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    client = {"Authorization": "Bearer sk-client", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    assert server.post("/v1/completions", BODY, client).status == 200
    shown = exemplars_of(scraped(server, {"Authorization": "Bearer sk-scraper"}).body.decode())
    assert shown == {name: [{"trace_id": trace_id}] for name in NAMES}
    # Without the scope no ids are shown.
    assert exemplars_of(server.get("/metrics", {"Accept": PROMETHEUS}).body.decode()) == {}


@pytest.mark.parametrize(
    ("accept", "is_accepted"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("Application/OpenMetrics-Text;Q=0.5", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.3", False),
        ("application/openmetrics-text;q=none", False),
        (PROMETHEUS, True),
    ],
)
def test_the_header_decides(accept: str, is_accepted: bool) -> None:
    assert accepts_open_metrics(accept) is is_accepted


@settings(deadline=None)
@given(st.text())
def test_any_header_is_answered(accept: str) -> None:
    accepts_open_metrics(accept)


def test_exemplars_are_bounded() -> None:
    exemplars = Exemplars(lambda: 5.0)
    name = "starling_time_to_first_token_seconds"
    for number in range(2 * MAX_SERIES):
        exemplars.add(name, 0.2, Source("request_id", f"req-{number}"), f"model-{number}")
    kept = [number for number in range(2 * MAX_SERIES) if exemplars.of(name, (f"model-{number}",))]
    assert len(kept) == MAX_SERIES
    exemplars.add(name, 0.21, Source("request_id", "x" * 200), "model-0")
    exemplars.add(name, 0.22, Source("request_id", ""), "model-0")
    (one,) = exemplars.of(name, ("model-0",)).values()
    assert (one.labels, one.value, one.timestamp) == ({"request_id": "req-0"}, 0.2, 5.0)
    assert re.fullmatch(r"req-\d+", one.labels["request_id"])
