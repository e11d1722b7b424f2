"""OpenTelemetry for the gateway: a trace context for each request, and its spans to the collector when it has ended."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipeline.config.schema import OtlpConfig
from stages.gateway.tracing.otlp_exporter import EndedRequest, OtlpExporter
from stages.gateway.tracing.spans import HttpCall
from stages.gateway.tracing.timeline import Report
from stages.gateway.tracing.trace_context import ContextReader, TraceContext


class Tracer:
    """One per gateway whose `tracing.otlp.endpoint` is set."""

    def __init__(self, config: OtlpConfig, exporter: OtlpExporter | None = None) -> None:
        """Raises `ConfigError` without the extra `otel`."""
        self._reader = ContextReader(config.sample_ratio)
        self.exporter = exporter or OtlpExporter(config)
        self._pid = os.getpid()

    def begin(self, parents: Sequence[str], states: Sequence[str]) -> TraceContext:
        """The context of a request with these `traceparent` and `tracestate` headers."""
        return self._reader.read(parents, states)

    def ended(self, context: TraceContext, report: Report, endpoint: str) -> None:
        """A request for text has ended, and its response with it."""
        if context.is_sampled:
            self.exporter.add(EndedRequest(context, report, endpoint, self._pid))

    def answered(self, context: TraceContext, call: HttpCall) -> None:
        """A request without a timeline has been answered."""
        if context.is_sampled:
            self.exporter.add(EndedRequest(context, call, pid=self._pid))


def make_tracer(config: OtlpConfig) -> Tracer | None:
    """None: no endpoint is configured. Raises `ConfigError` without the extra `otel`."""
    return Tracer(config) if config.endpoint else None
