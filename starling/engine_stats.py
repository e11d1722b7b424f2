"""Counters and latencies of an in-process engine. Latencies have the names of the server's metrics."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from starling.generation import LocalRequest

KEPT = 1000  # requests that latencies are of: the ones that ended last


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took, s, of the last `KEPT` requests that have it; 0.0 without any."""

    count: int  # of all requests
    mean: float
    p50: float
    p95: float
    max: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine was loaded, how many requests and KV pages are in each state, and latencies."""

    steps: int
    step_seconds: float  # time that the ranks spent in steps
    tokens_generated: int
    tokens_per_second: float  # of the time in steps
    prompt_tokens_cached: int
    preemptions: int  # sequences that gave their pages back and were computed again
    requests_waiting: int
    requests_running: int
    requests_kept: int  # running and finished ones that have not been released
    requests_finished: int  # also cancelled ones
    requests_failed: int
    kv_pages: int
    kv_pages_free: int
    kv_pages_cached: int
    kv_pages_leased: int
    queue_wait_seconds: Latency  # from `submit` to the first step that computes the request
    time_to_first_token_seconds: Latency  # from `submit`
    time_per_output_token_seconds: Latency  # mean of a request, from its first token to its end
    request_duration_seconds: Latency  # from `submit` to the end, of requests that ended with "stop" or "length"


class Durations:
    """The last `KEPT` of some durations, and the number of all."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT)
        self._count = 0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._last.append(seconds)
        self._count += 1

    def latency(self) -> Latency:
        """Percentiles are by nearest rank."""
        values = sorted(self._last) or [0.0]

        def percentile(share: float) -> float:
            return values[math.ceil(share * len(values)) - 1]

        mean = sum(values) / len(values)
        return Latency(count=self._count, mean=mean, p50=percentile(0.5), p95=percentile(0.95), max=values[-1])


class RequestStats:
    """Counts ended requests, and how long each took."""

    def __init__(self) -> None:
        self.finished = self.failed = 0
        self._queue_wait, self._first_token = Durations(), Durations()
        self._per_token, self._duration = Durations(), Durations()

    def record_end(self, request: LocalRequest, now: float) -> None:
        """A request has ended at `now`, s."""
        if request.scheduled is None:
            return  # `submit` has refused it
        if request.error is not None:
            self.failed += 1
        else:
            self.finished += 1
        if request.scheduled.started:
            self._queue_wait.add(request.scheduled.started - request.submitted_at)
        if request.first_token_at:
            self._first_token.add(request.first_token_at - request.submitted_at)
            if request.outputs > 1:
                self._per_token.add((now - request.first_token_at) / (request.outputs - 1))
        if request.finish_reason in ("stop", "length"):
            self._duration.add(now - request.submitted_at)

    def latencies(self) -> dict[str, Latency]:
        """By field of `EngineStats`."""
        return {
            "queue_wait_seconds": self._queue_wait.latency(),
            "time_to_first_token_seconds": self._first_token.latency(),
            "time_per_output_token_seconds": self._per_token.latency(),
            "request_duration_seconds": self._duration.latency(),
        }
