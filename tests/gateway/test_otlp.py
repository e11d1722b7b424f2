"""Traces of a gateway process at a real OTLP/HTTP collector, which may be down, slow or refuse everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server

pytest.importorskip("opentelemetry.sdk")

from pipeline.config.schema import OtlpConfig
from stages.gateway.tracing.otlp_exporter import BATCH, EndedRequest, OtlpExporter
from stages.gateway.tracing.spans import HttpCall
from stages.gateway.tracing.trace_context import TraceContext
from tests.otlp_collector import Collector, attributes

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a secret of the prompt"
BODY = {"model": MODEL, "prompt": SECRET, "max_tokens": 12, "seed": 5, "ignore_eos": True}
PATH = "/v1/completions"


def parent(number: int) -> tuple[str, dict[str, str]]:
    """A trace id, and the headers of a client's span in it."""
    trace_id = f"{TRACE[:-4]}{number:04x}"
    return trace_id, {"traceparent": f"00-{trace_id}-{SPAN}-01", "tracestate": "vendor=1"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


@pytest.fixture
def traced(make_server: MakeServer, collector: Collector) -> Server:
    server = make_server(tracing={"otlp": {"endpoint": collector.url, "service_name": "test"}})
    server.wait_ready()
    return server


def test_one_trace_for_a_request_and_its_headers(traced: Server, collector: Collector) -> None:
    trace_id, headers = parent(1)
    answer = traced.post(PATH, BODY, {**headers, "Authorization": "Bearer sk-hidden"})
    assert answer.status == 200
    root, *others = collector.trace(trace_id)
    assert answer.headers["traceparent"] == f"00-{trace_id}-{root.span_id.hex()}-01"
    assert answer.headers["tracestate"] == root.trace_state == "vendor=1"
    assert (root.parent_span_id.hex(), root.name, root.kind) == (SPAN, f"POST {PATH}", root.SPAN_KIND_SERVER)
    facts = attributes(root)
    assert facts["starling.request.id"] == answer.headers["X-Starling-Request"]
    assert (facts["gen_ai.usage.output_tokens"], facts["starling.outcome"]) == (12, "finished")
    assert {attributes(span)["starling.stage"] for span in others} >= {"gateway", "tokenizer"}
    for span in others:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    # Neither what the client asked nor its key leaves the server.
    sent = b"".join(collector.bodies)
    assert SECRET.encode() not in sent
    assert b"sk-hidden" not in sent
    assert answer.json["choices"][0]["text"].encode() not in sent

    # Refusals and endpoints without a timeline have one span; an invalid traceparent begins a trace.
    refused = traced.post(PATH, {**BODY, "max_tokens": -1}, {"traceparent": "00-bad", "tracestate": "a=1"})
    assert refused.status == 400
    assert "tracestate" not in refused.headers
    (span,) = collector.trace(refused.headers["traceparent"].split("-")[1])
    assert (span.parent_span_id, span.status.code) == (b"", 0)
    assert attributes(span)["http.response.status_code"] == 400
    models = traced.get("/v1/models")
    (span,) = collector.trace(models.headers["traceparent"].split("-")[1])
    assert span.name == "GET /v1/models"
    assert "traceparent" not in traced.get("/health").headers

    # What the client does not sample is not sent; its context comes back.
    unsampled = f"00-{'ab' * 16}-{SPAN}-00"
    answer = traced.post(PATH, BODY, {"traceparent": unsampled})
    assert answer.headers["traceparent"].startswith(f"00-{'ab' * 16}-")
    assert answer.headers["traceparent"].endswith("-00")
    trace_id, headers = parent(2)
    assert traced.post(PATH, BODY, headers).status == 200
    collector.trace(trace_id)  # was sent after it
    assert bytes.fromhex("ab" * 16) not in b"".join(collector.bodies)


def test_the_successor_of_a_killed_gateway_reports_the_same_span(traced: Server, collector: Collector) -> None:
    traced.peers.do(lambda: setattr(traced.peers, "is_stepping", False))
    trace_id, headers = parent(3)
    stream = traced.stream(PATH, BODY, headers)
    own = stream.response.headers["traceparent"].split("-")[2]
    traced.kill_and_restart()
    stream.close()
    traced.peers.do(lambda: setattr(traced.peers, "is_stepping", True))
    root, *others = collector.trace(trace_id)
    assert root.span_id.hex() == own
    assert root.parent_span_id.hex() == SPAN
    assert "recovery" in {span.name for span in others}
    assert attributes(root)["starling.outcome"] == "finished"


def test_a_collector_that_fails_costs_traces_and_nothing_else(make_server: MakeServer) -> None:
    with Collector() as collector:
        server = make_server(tracing={"otlp": {"endpoint": collector.url, "queue": 1, "timeout_ms": 60_000}})
        server.wait_ready()
        collector.gate.clear()  # it takes a batch and does not answer
        assert server.post(PATH, BODY).status == 200
        collector.wait(lambda: collector.posts == 1)
        answers = [server.post(PATH, BODY) for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.json["choices"][0]["text"] for answer in answers}) == 1
        while count(server, "dropped") < 3:  # a trace is handed over after its response
            pass
        assert count(server, "dropped") == 3
        collector.status = 500
        collector.gate.set()
        collector.wait(lambda: collector.posts == 2)  # the batch is sent again
        collector.status = 400
        server.wait_log("the collector does not take traces: they are lost, requests are not")
        collector.status = 200
        while not collector.bodies:
            assert server.post(PATH, BODY).status == 200
        server.wait_log("the collector takes traces again")
        assert count(server, "failed") >= 1
        assert count(server, "sent") >= 1
    assert server.post(PATH, BODY).status == 200  # it is gone


def count(server: Server, outcome: str) -> int:
    name = f'starling_traces_total{{outcome="{outcome}"}} '
    (line,) = [line for line in server.get("/metrics").body.decode().splitlines() if line.startswith(name)]
    return int(float(line.removeprefix(name)))


# ------------------------------------------------------------------ the exporter, without a gateway


def ended(number: int = 1) -> EndedRequest:
    context = TraceContext(f"{number:032x}", SPAN, "", is_sampled=True)
    return EndedRequest(context, HttpCall("GET", "/v1/models", 200, 1e9, 0.5, 1))


def exporter(send: Callable[[list[Any]], bool], queue: int = 8) -> OtlpExporter:
    return OtlpExporter(OtlpConfig(endpoint="http://unused", queue=queue), send)


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    entered, gate = threading.Event(), threading.Event()

    def send(spans: list[Any]) -> bool:
        entered.set()
        return gate.wait(60)

    one = exporter(send)
    one.add(ended())
    assert entered.wait(60)
    for _ in range(20):
        one.add(ended())
    assert one.dropped == 12
    gate.set()
    one.close()


def test_a_thread_that_cannot_be_started_is_started_for_the_next_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = exporter(lambda spans: True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        one.add(ended(1))
    one.add(ended(2))
    one.close()
    assert one.sent == 2


def test_waiting_traces_are_sent_together_and_at_the_end() -> None:
    batches: list[int] = []

    def send(spans: list[Any]) -> bool:
        batches.append(len(spans))
        return True

    one = exporter(send, queue=100)
    for number in range(1, 2 * BATCH + 1):
        one.add(ended(number))
    one.close()
    assert one._thread is not None
    one._thread.join(60)
    assert sum(batches) == one.sent == 2 * BATCH
    assert max(batches) <= BATCH


def test_an_error_of_the_library_ends_nothing() -> None:
    done = threading.Event()
    attempts: list[int] = []

    def send(spans: list[Any]) -> bool:
        attempts.append(len(spans))
        if len(attempts) == 1:
            raise RuntimeError("broken")
        done.set()
        return True

    one = exporter(send)
    one.add(ended())
    while one.failed == 0:
        time.sleep(0.001)
    one.add(ended())
    assert done.wait(60)
    one.close()
    assert (one.failed, len(attempts)) == (1, 2)
