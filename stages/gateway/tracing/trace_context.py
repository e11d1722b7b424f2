"""W3C Trace Context: the trace that a request belongs to, from and to the headers `traceparent` and `tracestate`.

Parsed by OpenTelemetry's own propagator, which is imported with the first `Tracer` and not before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import msgspec

from pipeline.errors import ConfigError
from pipeline.extras import how_to_install

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE = 2048  # characters of `tracestate`; the standard asks for at least 512
RANDOM_BITS = 64  # the part of a trace id that a ratio is compared with, as in TraceIdRatioBased


class TraceContext(msgspec.Struct, array_like=True, frozen=True):
    """Of one request. It is journaled with it, so that a successor of the gateway reports the same spans."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits: the request's own span
    parent_id: str = ""  # 16 hex digits: the client's span; "": the trace begins here
    is_sampled: bool = False
    state: str = ""  # tracestate, valid

    @property
    def traceparent(self) -> str:
        """The header that names the request's own span."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    @property
    def headers(self) -> dict[str, str]:
        """Both headers; no `tracestate` without a state."""
        return {TRACEPARENT: self.traceparent, **({TRACESTATE: self.state} if self.state else {})}


class ContextReader:
    """Makes the context of each request. A client's decision whether to sample is kept."""

    def __init__(self, sample_ratio: float) -> None:
        """`sample_ratio`: of the traces that begin here. Raises `ConfigError` without the package."""
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise missing_packages() from None
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would log what clients send
        self._propagator = TraceContextTextMapPropagator()
        self._span_of = trace.get_current_span
        self._bound = round(sample_ratio * (1 << RANDOM_BITS))

    def read(self, parents: Sequence[str], states: Sequence[str]) -> TraceContext:
        """The context of a request with these headers. An invalid or repeated `traceparent` counts as none."""
        own = os.urandom(8).hex()
        carrier: Mapping[str, str] = {TRACEPARENT: parents[0], TRACESTATE: ",".join(states)} if parents else {}
        parent = self._span_of(self._propagator.extract(carrier)).get_span_context()
        if len(parents) != 1 or not parent.is_valid:
            trace_id = os.urandom(16)
            is_sampled = int.from_bytes(trace_id[8:], "big") < self._bound
            return TraceContext(trace_id.hex(), own, "", is_sampled)
        state = parent.trace_state.to_header()
        return TraceContext(
            f"{parent.trace_id:032x}",
            own,
            f"{parent.span_id:016x}",
            parent.trace_flags.sampled,
            state if len(state) <= MAX_STATE else "",
        )


def missing_packages() -> ConfigError:
    """The error where OpenTelemetry is not installed."""
    return ConfigError(
        f"tracing.otlp.endpoint needs the extra `otel`: {how_to_install('otel')}; or leave it empty",
        "tracing.otlp.endpoint",
    )
