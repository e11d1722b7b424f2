"""The gateway's own numbers, and the figures of /health.

Touched once for a request, never for a token.  Names and labels are those of pipeline/observe/metrics.py;
the other stages' numbers reach /metrics through their snapshots.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pipeline.observe.metrics import Metrics
from stages.gateway.requests.relay import Counts
from stages.gateway.requests.response_cache import HIT, ResponseCache
from stages.gateway.requests.state import RequestState


class GatewayMetrics:
    def __init__(self, numbers: Metrics, clock: Callable[[], float]) -> None:
        self.numbers = numbers
        self.total_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._clock = clock
        self._started = clock()

    def answered(self, endpoint: str, status: int, duration_s: float, code: str) -> None:
        """An HTTP request is over; `code` is its error's, "" without one."""
        self.total_requests += 1
        self.numbers.add("starling_requests_total", endpoint, str(status))
        self.numbers.observe("starling_request_duration_seconds", duration_s, endpoint)
        if code:
            self.numbers.add("starling_rejections_total", code)

    def ended(self, request: RequestState) -> None:
        """A request for text is over."""
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += request.cached_tokens
        begun = request.first_token_at
        if begun:
            waited = begun - request.started_at
            self.numbers.observe("starling_time_to_first_token_seconds", waited, request.spec.model)

    def looked_up(self, request: RequestState) -> None:
        """In the response cache."""
        found = "hits" if request.response_cache == HIT else "misses"
        self.numbers.add(f"starling_response_cache_{found}_total", request.spec.model)

    def sample_responses(self, cache: ResponseCache, models: Iterable[str]) -> None:
        """Before the numbers are read, when there is one."""
        for model in models:  # shown from the start: a rate needs its zero
            for name in ("starling_response_cache_hits_total", "starling_response_cache_misses_total"):
                self.numbers.add(name, model, amount=0.0)
        self.numbers.set("starling_response_cache_entries", len(cache))
        self.numbers.set("starling_response_cache_bytes", cache.bytes)
        self.numbers.set("starling_response_cache_evictions_total", cache.evicted, "full")
        self.numbers.set("starling_response_cache_evictions_total", cache.expired, "ttl")

    def sample(self, in_flight: int, counts: Counts, left_out: int) -> None:
        """Before the numbers are read."""
        self.numbers.set("starling_journal_left_out_total", left_out)
        self.numbers.set("starling_requests_in_flight", in_flight)
        self.numbers.set("starling_recoveries_total", counts.resubmitted)

    def health(self, status: str) -> dict[str, object]:
        """As seed 003 draws it."""
        rate = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        return {
            "status": status,
            "uptime_seconds": int(self._clock() - self._started),
            "total_requests": self.total_requests,
            "cache_hit_rate": round(rate, 4),
            "memory_usage_mb": _resident_mb(),
        }


def _resident_mb() -> int:
    """Of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") >> 20
