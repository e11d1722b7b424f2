"""The gateway's own metrics, and the figures of /health.

Updated once for each request, and by the frame of tokens for the gaps between them. Names and labels are defined in
pipeline/observe/metric_families.py; the metrics of the other stages reach /metrics through their snapshots.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from pipeline.observe.exemplars import Exemplars, Source
from pipeline.observe.metrics import MAX_SERIES, Metrics
from pipeline.observe.process_use import ProcessTotals
from stages.gateway.requests.idempotency import IdempotencyKeys
from stages.gateway.requests.relay import Counts
from stages.gateway.requests.response_cache import HIT, ResponseCache
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.tracing.otlp_exporter import OtlpExporter
from stages.gateway.tracing.trace_context import TraceContext

MEASURE_S = 1.0  # between two measurements of memory
GAPS = "starling_inter_token_seconds"


class GatewayMetrics:
    """One per gateway. `numbers` holds the series, `clock` is monotonic, in s. `measure_memory`: of all processes."""

    def __init__(
        self,
        numbers: Metrics,
        clock: Callable[[], float],
        measure_memory: Callable[[], int],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.numbers = numbers
        self.exemplars = Exemplars(wall)
        self.processes = ProcessTotals(numbers)
        self.total_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._asked_models: set[str] = set()  # that requests have named; bounded
        self._clock = clock
        self._started = clock()
        self._measure_memory = measure_memory
        self._memory_bytes = 0
        self._next_measurement = self._started

    def answered(
        self,
        endpoint: str,
        status: int,
        duration_s: float,
        code: str,
        tenant: str = "",
        source: Source | None = None,
    ) -> None:
        """Count an HTTP request that has been answered. `code`: of its error; "": none. `tenant` "": not known.

        `source`: its trace, or the request for text that it is.
        """
        self.total_requests += 1
        self.numbers.add("starling_requests_total", endpoint, str(status))
        self.numbers.observe("starling_request_duration_seconds", duration_s, endpoint)
        if source is not None:
            self.exemplars.add("starling_request_duration_seconds", duration_s, source, endpoint)
        if code:
            self.numbers.add("starling_rejections_total", code)
        if tenant:
            self.numbers.add("starling_tenant_requests_total", tenant)

    def gaps(self, request: RequestState, gap_s: float | None, tokens: int) -> None:
        """Count the gaps of tokens that came together: before the first of them `gap_s`, between the others none.

        `gap_s` None: no token of the sequence came before, or it came to this gateway's predecessor.
        """
        if request.is_probe:
            return
        model = request.spec.model
        if gap_s is not None:
            self.numbers.observe(GAPS, gap_s, model)
            request.longest_gap_s = max(request.longest_gap_s, gap_s)
        if tokens > 1:
            self.numbers.observe(GAPS, 0.0, model, times=tokens - 1)

    def ended(self, request: RequestState) -> None:
        """Count a request for text that has ended."""
        self.numbers.add("starling_model_requests_total", request.spec.shown_model)
        if len(self._asked_models) < MAX_SERIES:
            self._asked_models.add(request.spec.shown_model)
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += request.cached_tokens
        output = sum(len(sequence.tokens) for sequence in request.sequences)
        for kind, count in (("prompt", request.prompt_tokens), ("cached", request.cached_tokens), ("output", output)):
            self.numbers.add("starling_tenant_request_tokens_total", request.spec.tenant, kind, amount=count)
        begun = request.first_token_at
        if begun:
            waited = begun - request.started_at
            self._observe("starling_time_to_first_token_seconds", waited, request)
        longest = max((len(sequence.tokens) for sequence in request.sequences), default=0)
        if request.sequences and (begun or request.outcome is Outcome.FINISHED):
            self._measure_lengths(request, output, longest)
            if not request.is_recovered:  # what this gateway's predecessor saw of it is not known
                self._measure_times(request)
        if request.longest_gap_s:
            source = source_of(request.spec.trace, request.id)
            self.exemplars.add(GAPS, request.longest_gap_s, source, request.spec.model)
        if begun and longest > 1 and request.response_cache != HIT:  # a stored answer was not generated
            between_s = (self._clock() - begun) / (longest - 1)
            self._observe("starling_time_per_output_token_seconds", between_s, request)

    def _measure_lengths(self, request: RequestState, output: int, longest: int) -> None:
        """Count the lengths of a request that has had an answer. `output`: tokens of all its choices."""
        model, prompt = request.spec.model, request.prompt_tokens
        for name, value in (
            ("starling_request_prompt_tokens", prompt),
            ("starling_request_computed_tokens", prompt - request.cached_tokens),
            ("starling_request_output_tokens", output),
            ("starling_request_longest_output_tokens", longest),
            ("starling_request_max_tokens", max(s.spec.max_tokens for s in request.sequences)),
            ("starling_request_choices", 1 + max(s.spec.choice for s in request.sequences)),
        ):
            self.numbers.observe(name, value, model)
        context = max(sequence.n_prompt + len(sequence.tokens) for sequence in request.sequences)
        self.numbers.raise_to("starling_context_tokens_max", context, model)

    def _measure_times(self, request: RequestState) -> None:
        """Count the time of a request, and those of the phases of its sequences."""
        model, observe = request.spec.model, self.numbers.observe
        observe("starling_end_to_end_seconds", self._clock() - request.started_at, model)
        for sequence in request.sequences:
            begun, first, last = sequence.started_at, sequence.first_token_at, sequence.last_token_at
            if begun and begun <= first <= last:
                observe("starling_prefill_seconds", first - begun, model)
                observe("starling_decode_seconds", last - first, model)
                observe("starling_inference_seconds", last - begun, model)

    def _observe(self, name: str, value: float, request: RequestState) -> None:
        """Add a value of a request to a histogram of its model."""
        model = request.spec.model
        self.numbers.observe(name, value, model)
        self.exemplars.add(name, value, source_of(request.spec.trace, request.id), model)

    def looked_up(self, request: RequestState) -> None:
        """Count a look-up in the response cache."""
        found = "hits" if request.response_cache == HIT else "misses"
        self.numbers.add(f"starling_response_cache_{found}_total", request.spec.model)

    def sample_responses(self, cache: ResponseCache, models: Iterable[str]) -> None:
        """Update the response cache's metrics, if it is enabled."""
        for model in models:  # from the start, because a rate needs a first value of zero
            for name in ("starling_response_cache_hits_total", "starling_response_cache_misses_total"):
                self.numbers.add(name, model, amount=0.0)
        self.numbers.set("starling_response_cache_entries", len(cache))
        self.numbers.set("starling_response_cache_bytes", cache.bytes)
        self.numbers.set("starling_response_cache_evictions_total", cache.evicted, "full")
        self.numbers.set("starling_response_cache_evictions_total", cache.expired, "ttl")

    def sample(self, in_flight: int, counts: Counts, left_out: int, unreadable: int) -> None:
        """Update the metrics that are read from state.

        `left_out`: requests that could not be journaled; `unreadable`: journals that could not be read.
        """
        self.numbers.set("starling_journal_left_out_total", left_out)
        self.numbers.set("starling_journal_unreadable_total", unreadable)
        self.numbers.set("starling_requests_in_flight", in_flight)
        self.numbers.set("starling_recoveries_total", counts.resubmitted)
        self.numbers.set("starling_late_frames_total", counts.late, "gateway")
        self.numbers.set("starling_token_gaps_total", counts.gaps)

    def sample_models(self, names: Iterable[str], served: Collection[str]) -> None:
        """Update the number of requests of each model and adapter. `names`: of each request that has not ended.

        `served`: those that requests may name. Others that have no request make room for the series of the next ones.
        """
        counts = Counter(names)
        self._asked_models |= counts.keys()
        for name in self._asked_models - counts.keys() - set(served):
            self._asked_models.remove(name)
            self.numbers.drop("starling_model_requests_in_flight", name)
            self.numbers.drop("starling_model_requests_total", name)
        for name in self._asked_models:
            self.numbers.set("starling_model_requests_in_flight", counts[name], name)

    def sample_network(self, received: int, sent: int) -> None:
        """Update the metrics of HTTP connections."""
        self.numbers.set("starling_http_bytes_total", received, "received")
        self.numbers.set("starling_http_bytes_total", sent, "sent")

    def sample_traces(self, exporter: OtlpExporter) -> None:
        """Update the metrics of OpenTelemetry's traces."""
        for outcome, count in (("sent", exporter.sent), ("failed", exporter.failed), ("dropped", exporter.dropped)):
            self.numbers.set("starling_traces_total", count, outcome)

    def sample_keys(self, keys: IdempotencyKeys) -> None:
        """Update the metrics of idempotency keys."""
        self.numbers.set("starling_idempotency_keys", len(keys))
        self.numbers.set("starling_idempotency_bytes", keys.bytes)
        self.numbers.set("starling_idempotency_attached_total", keys.attached)
        self.numbers.set("starling_idempotency_evictions_total", keys.evicted)

    def health(self, status: str) -> dict[str, object]:
        """The body of /health."""
        rate = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        return {
            "status": status,
            "uptime_seconds": int(self._clock() - self._started),
            "total_requests": self.total_requests,
            "cache_hit_rate": round(rate, 4),
            "memory_usage_mb": self._measured_bytes() >> 20,
        }

    def _measured_bytes(self) -> int:
        """Memory of the server's processes, measured at most once in `MEASURE_S`: /health needs no key."""
        now = self._clock()
        if now >= self._next_measurement:
            self._next_measurement = now + MEASURE_S
            self._memory_bytes = self._measure_memory()
        return self._memory_bytes


def source_of(context: TraceContext | None, request_id: str) -> Source:
    """What an exemplar of a request refers to: its trace if that is sampled, otherwise the request itself."""
    if context is not None and context.is_sampled:
        return Source("trace_id", context.trace_id)
    return Source("request_id", request_id)
