"""Sends the spans of ended requests to an OpenTelemetry collector (OTLP over HTTP), in a thread of its own.

The event loop puts a timeline into a bounded queue and goes on. The thread makes spans of it and posts them in batches.
A collector that is slow or gone costs traces, which are counted, and nothing else. Needs the extra `otel`; headers,
certificates and compression are taken from OpenTelemetry's own environment variables.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pipeline.config.schema import OtlpConfig
from stages.gateway.tracing.spans import HttpCall, Span, spans_of, spans_of_call
from stages.gateway.tracing.timeline import Report
from stages.gateway.tracing.trace_context import TraceContext, missing_packages

log = logging.getLogger("starling.gateway.otlp")

BATCH = 32  # traces in one post
GATHER_S = 0.5  # that the thread waits for more traces after the first one of a batch
CLOSE_S = 1.0  # that the end of the process waits for the last batch
TRACES_PATH = "/v1/traces"


class EndedRequest(NamedTuple):
    """What is sent of a request: its timeline, or a call without one. `pid`: of this gateway."""

    context: TraceContext
    what: Report | HttpCall
    endpoint: str = ""
    pid: int = 0


class OtlpExporter:
    """One per gateway. `add` is for the event loop; everything else runs in the thread."""

    def __init__(self, config: OtlpConfig, send: Callable[[list[Any]], bool] | None = None) -> None:
        """`send` replaces the connection to the collector. Raises `ConfigError` without the packages."""
        self.sent = self.failed = self.dropped = 0  # traces
        self._queue: queue.Queue[EndedRequest | None] = queue.Queue(config.queue)  # None wakes the thread to end
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_down = False
        self._config = config
        self._shutdown: Callable[[], None] = lambda: None
        self._encoder = _Encoder(config.service_name)
        self._send = send or self._connect()

    def _connect(self) -> Callable[[list[Any]], bool]:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import SpanExportResult
        except ImportError:
            raise missing_packages() from None
        url = self._config.endpoint.rstrip("/")
        exporter = OTLPSpanExporter(
            url if url.endswith(TRACES_PATH) else url + TRACES_PATH, timeout=self._config.timeout_ms / 1000
        )
        self._shutdown = exporter.shutdown
        return lambda spans: bool(exporter.export(spans) is SpanExportResult.SUCCESS)

    def add(self, ended: EndedRequest) -> None:
        """Send a request's spans later; drop them if too many wait. Never blocks."""
        try:
            self._queue.put_nowait(ended)
        except queue.Full:
            self.dropped += 1
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="otlp", daemon=True)
            with contextlib.suppress(RuntimeError):  # there are too many: the next request has another attempt
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Send what waits, for `CLOSE_S` at most."""
        self._stopping.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)
            self._shutdown()  # ends the pauses between attempts

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not (self._stopping.is_set() and self._queue.empty()):
            first = self._queue.get()
            if self._queue.qsize() < BATCH:
                self._stopping.wait(GATHER_S)
            batch = [ended for ended in (first, *self._waiting()) if ended is not None]
            if batch:
                self._export(batch)

    def _waiting(self) -> Iterator[EndedRequest | None]:
        for _ in range(BATCH - 1):
            try:
                yield self._queue.get_nowait()
            except queue.Empty:
                return

    def _export(self, batch: list[EndedRequest]) -> None:
        try:
            is_sent = self._send([span for ended in batch for span in self._encoder.encode(ended)])
        except Exception as error:  # whatever the collector or the library does, requests are served
            is_sent = False
            log.debug("traces were not sent", extra={"reason": type(error).__name__})
        if is_sent:
            self.sent += len(batch)
        else:
            self.failed += len(batch)
        if is_sent == self._is_down:
            self._is_down = not is_sent
            address = {"endpoint": self._config.endpoint}
            if is_sent:
                log.info("the collector takes traces again", extra=address)
            else:
                log.warning("the collector does not take traces: they are lost, requests are not", extra=address)


class _Encoder:
    """Makes OpenTelemetry's spans of ours."""

    def __init__(self, service_name: str) -> None:
        from importlib.metadata import version

        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import Event, ReadableSpan
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError:
            raise missing_packages() from None
        self._api, self._span, self._event = trace, ReadableSpan, Event
        release, host = version("starling"), os.uname().nodename
        self._resource = Resource.create({"service.name": service_name, "service.version": release, "host.name": host})
        self._scope = InstrumentationScope("starling", release)

    def encode(self, ended: EndedRequest) -> list[Any]:
        """The spans of a request; its own first."""
        if isinstance(ended.what, HttpCall):
            spans = spans_of_call(ended.what)
        else:
            spans = spans_of(ended.what, ended.endpoint, ended.pid)
        context, api = ended.context, self._api
        state = api.TraceState.from_header([context.state]) if context.state else None

        def name(span_id: int, is_remote: bool = False) -> Any:
            flags = api.TraceFlags(int(context.is_sampled))
            return api.SpanContext(int(context.trace_id, 16), span_id, is_remote, flags, state)

        own = name(int(context.span_id, 16))
        names = [own, *(name(int.from_bytes(os.urandom(8), "big") or 1) for _ in spans[1:])]
        client = name(int(context.parent_id, 16), is_remote=True) if context.parent_id else None
        return [self._encode(span, names[i], names[span.parent] if i else client) for i, span in enumerate(spans)]

    def _encode(self, span: Span, name: Any, parent: Any) -> Any:
        api = self._api
        is_own = span.parent < 0 or parent is None or parent.is_remote
        attributes = {"starling.stage": span.stage, **({"process.pid": span.pid} if span.pid else {})}
        return self._span(
            span.name,
            context=name,
            parent=parent,
            resource=self._resource,
            attributes={**attributes, **span.attributes},
            events=[self._event(event, facts, round(at * 1e9)) for at, event, facts in span.events],
            kind=api.SpanKind.SERVER if is_own else api.SpanKind.INTERNAL,
            status=api.Status(api.StatusCode.ERROR, span.error) if span.error else api.Status(api.StatusCode.UNSET),
            start_time=round(span.begin * 1e9),
            end_time=round(max(span.begin, span.end) * 1e9),
            instrumentation_scope=self._scope,
        )
