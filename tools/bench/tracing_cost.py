"""`python -m tools.bench.tracing_cost`: what tracing costs the gateway for each request. The last line is JSON.

Records a request of one prompt chunk in three ways, in alternating rounds: without timelines (`tracing.buffer_mb: 0`),
with them (the default), and with a trace for OpenTelemetry, whose spans are posted to a collector of this process.  The
first three figures are CPU time of the event loop, which serves all requests; the next one is that of the thread which
makes and posts the spans.  Nothing is recorded for a step of the output: a step costs the same in all three.
"""

from __future__ import annotations

import http.server
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import msgspec

from pipeline.config.schema import OtlpConfig, TracingConfig
from stages.gateway.tracing.recorder import Recorder
from stages.gateway.tracing.tracer import Tracer

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REQUESTS = 500  # of each way in a round
MS = 0.3  # of an event that took some time


def requests_us(recorder: Recorder, tracer: Tracer | None) -> float:
    """Mean CPU time of a request in the event loop, in us."""
    begun = time.thread_time_ns()
    for _ in range(REQUESTS):
        context = tracer.begin([PARENT], []) if tracer is not None else None
        with recorder.embedding(
            time.monotonic(), "embeddings", tenant="tenant", model="model", client_id="", context=context
        ) as trace:
            if trace is not None:
                trace.add(time.monotonic(), "tokenized", {"ms": MS, "tokens": 35}, stage="tokenizer", pid=2)
            recorder.submitted(trace, "model", 1)
            if trace is not None:
                trace.add(time.monotonic(), "queued", {"ahead": 0}, stage="scheduler", pid=3, choice=0)
                admitted: dict[str, int | float | str] = {"cached_tokens": 16, "kv_ms": MS}
                trace.add(time.monotonic(), "admitted", admitted, stage="scheduler", pid=3, choice=0)
                chunk: dict[str, int | float | str] = {
                    "begin": 16,
                    "end": 35,
                    "ms": MS,
                    "step": 88,
                    "batch": 1,
                    "samples": 1,
                }
                trace.add(time.monotonic(), "prefill", chunk, stage="worker", pid=4, choice=0)
            recorder.embedded(trace, 35)
    return (time.thread_time_ns() - begun) / 1e3 / REQUESTS


@contextmanager
def collector() -> Iterator[str]:
    """A collector that takes everything; yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def thread_us(tracer: Tracer) -> float:
    """CPU time of the exporter's thread for each trace that it has sent so far, in us."""
    (thread,) = [one for one in threading.enumerate() if one.name == "otlp"]
    assert thread.ident is not None
    spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return spent * 1e6 / max(1, tracer.exporter.sent)


@click.command()
@click.option("--rounds", default=20, show_default=True, help="Alternating rounds of 500 requests each.")
@click.option("--rate", default=20.0, show_default=True, help="Requests per second of the shares.")
def main(rounds: int, rate: float) -> None:
    """What tracing costs the gateway for each request."""
    with collector() as url:
        tracer = Tracer(OtlpConfig(endpoint=url, queue=REQUESTS))
        ways: dict[str, tuple[Recorder, Tracer | None]] = {
            "off": (Recorder(TracingConfig(buffer_mb=0, slow_request_ms=0), time.monotonic, time.time), None),
            "timelines": (Recorder(TracingConfig(), time.monotonic, time.time), None),
            "otlp": (Recorder(TracingConfig(), time.monotonic, time.time, tracer=tracer), tracer),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in sorted(ways, reverse=bool(number % 2)):
                found[way].append(requests_us(*ways[way]))
            while tracer.exporter.sent + tracer.exporter.dropped + tracer.exporter.failed < (number + 1) * REQUESTS:
                time.sleep(0.01)  # the other ways are measured without the thread
        figures = {f"{way}_us_per_request": statistics.median(times) for way, times in found.items()}
        figures |= {f"{way}_range_us": max(times) - min(times) for way, times in found.items()}
        figures["thread_us_per_request"] = thread_us(tracer)
        tracer.exporter.close()
    total_us = figures["otlp_us_per_request"] - figures["off_us_per_request"] + figures["thread_us_per_request"]
    figures["otlp_percent_of_a_core"] = total_us * rate / 1e4
    print(msgspec.json.encode({name: round(value, 2) for name, value in figures.items()}).decode())


if __name__ == "__main__":
    main()
