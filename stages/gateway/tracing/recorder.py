"""Records the timelines of all requests, keeps those that have ended, and logs the slow ones.

A timeline ends when the request has its outcome and no response of it is being sent.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.config.schema import TracingConfig
from pipeline.errors import NotFound, StarlingError
from pipeline.protocol.messages import Hello, SequenceEvent, Tokens
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.tracing.kept import KeptTimelines
from stages.gateway.tracing.timeline import Phase, Report, RequestTrace, Totals, described, ms
from stages.gateway.tracing.trace_context import TraceContext
from stages.gateway.tracing.tracer import Tracer

log = logging.getLogger("starling.gateway.requests")

EMBEDDING = "emb-"  # begins the ids of requests for vectors
OFFSET_S = 60.0  # how long the difference between two processes' clocks counts as measured


class Recorder:
    """One per gateway. `clock` is monotonic, `wall` is s since 1970."""

    def __init__(
        self,
        config: TracingConfig,
        clock: Callable[[], float],
        wall: Callable[[], float],
        *,
        is_remote: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """`is_remote`: the scheduler may be on another machine, whose monotonic clock is another one.

        `tracer`: gets the timelines of requests that have a trace context.
        """
        self._clock = clock
        self._wall = wall
        self._slow_s = config.slow_request_ms / 1000
        self._is_enabled = bool(config.buffer_mb or self._slow_s or tracer is not None)
        self._tracer = tracer
        self._kept = KeptTimelines(config.buffer_mb << 20, config.tenant_buffer_mb << 20)
        self._open: dict[str, RequestTrace] = {}
        self._pid = os.getpid()
        self._pids: dict[str, int] = {}  # of the stages that are connected
        self._is_remote = is_remote
        self._offset_s = 0.0  # of this process's clock from the scheduler's
        self._measured_until = float("-inf")

    # ---------------------------------------------------------------- begin and end

    def begin(
        self,
        request_id: str,
        started_at: float,
        *,
        tenant: str,
        model: str,
        client_id: str,
        context: TraceContext | None = None,
    ) -> RequestTrace | None:
        """The timeline of a request whose body has been parsed; None: nothing is recorded."""
        if not self._is_enabled:
            return None
        now = self._clock()
        received = self._wall() - (now - started_at)
        trace = RequestTrace(
            request_id,
            started_at,
            tenant=tenant,
            model=model,
            client_id=client_id,
            received=received,
            pid=self._pid,
            context=context,
        )
        self._open[request_id] = trace
        trace.add(started_at, "received")
        trace.add(now, "parsed")
        return trace

    def recover(self, request: RequestState, age_s: float) -> None:
        """Begin the timeline of a request of this process's predecessor, which was received `age_s` ago."""
        spec, now = request.spec, self._clock()
        trace = self.begin(
            spec.id,
            now - max(0.0, age_s),
            tenant=spec.tenant,
            model=spec.model,
            client_id=spec.client_id,
            context=spec.trace,
        )
        if trace is None:
            return
        trace.events.clear()
        trace.add(trace.started_at, "received", pid=0)  # what came between is lost with the predecessor
        trace.add(now, "recovered")
        trace.enter(Phase.RECOVERY, trace.started_at)
        self.attach(request, trace)

    def attach(self, request: RequestState, trace: RequestTrace | None) -> None:
        """The request that the timeline is of."""
        request.trace = trace
        if trace is not None:
            trace.is_single = len(request.sequences) == 1
            turn = request.spec.generation.turn
            trace.session_id = turn.session if turn else ""
            trace.version = request.spec.version
            trace.endpoint = request.spec.generation.endpoint

    def withdraw(self, trace: RequestTrace | None) -> None:
        """The request was refused before it had a state: its log line says why."""
        if trace is not None:
            self._forget(trace)
            trace.context = None  # its HTTP call is what can be reported of it

    def _forget(self, trace: RequestTrace) -> None:
        if self._open.get(trace.id) is trace:
            del self._open[trace.id]

    @contextmanager
    def responding(self, request: RequestState, *, is_resumed: bool = False) -> Iterator[None]:
        """While a response of the request is being sent; `is_resumed`: not its first one."""
        trace = request.trace
        if trace is None or self._open.get(trace.id) is not trace:
            yield
            return
        trace.n_readers += 1
        if is_resumed:
            trace.add(self._clock(), "client resumed")
        try:
            yield
        except BaseException:
            if trace.totals is None:
                trace.add(self._clock(), "client left")
            raise
        finally:
            trace.n_readers -= 1
            if not trace.n_readers and trace.totals is not None:
                self._close(trace)

    @contextmanager
    def embedding(
        self,
        started_at: float,
        endpoint: str,
        *,
        tenant: str,
        model: str,
        client_id: str,
        context: TraceContext | None = None,
    ) -> Iterator[RequestTrace | None]:
        """The timeline of a request for vectors, until its response is written; None: nothing is recorded."""
        name = f"{EMBEDDING}{secrets.token_hex(12)}"
        trace = self.begin(name, started_at, tenant=tenant, model=model, client_id=client_id or name, context=context)
        if trace is None:
            yield None
            return
        trace.is_single, trace.endpoint = False, endpoint
        try:
            yield trace
        except BaseException as error:
            if not trace.version:
                self.withdraw(trace)
                raise
            if trace.totals is None:
                code = error.code if isinstance(error, StarlingError) else ""
                outcome = Outcome.FAILED if isinstance(error, Exception) else Outcome.ABANDONED
                self._end_embedding(trace, Totals(outcome.value, error=code))
            self._close(trace)
            raise
        self._close(trace)

    def submitted(self, trace: RequestTrace | None, version: str, n_inputs: int) -> None:
        """The inputs of a request for vectors are tokenized, and go to the scheduler."""
        if trace is not None:
            trace.version = version
            trace.add(self._clock(), "submitted", {"sequences": n_inputs})

    def embedded(self, trace: RequestTrace | None, n_tokens: int) -> None:
        """A request for vectors has all of them."""
        if trace is not None:
            self._end_embedding(trace, Totals(Outcome.FINISHED.value, n_tokens))

    def _end_embedding(self, trace: RequestTrace, totals: Totals) -> None:
        now = self._clock()
        trace.add(now, totals.outcome, {"error": totals.error} if totals.error else {})
        trace.end(now, totals)

    def ended(self, request: RequestState) -> None:
        """The request has its outcome."""
        trace = request.trace
        if trace is None or trace.totals is not None:
            return
        now = self._clock()
        facts: dict[str, Any] = {"tokens": request.completion_tokens}
        error = request.error.code if request.error is not None else ""
        if error:
            facts["error"] = error
        if trace.detokenize_s:
            trace.add(now, "detokenized", {"ms": ms(trace.detokenize_s), "write_ms": ms(trace.write_s)})
        trace.add(now, request.outcome.value, facts)
        totals = Totals(
            request.outcome.value, request.prompt_tokens, request.cached_tokens, request.completion_tokens, error
        )
        trace.end(now, totals)
        if not trace.n_readers:
            self._close(trace)

    def _close(self, trace: RequestTrace) -> None:
        now = self._clock()
        self._forget(trace)
        if trace.totals is not None and trace.totals.outcome == Outcome.FINISHED.value:
            trace.add(now, "written")
        report = trace.report(now)
        self._kept.add(report)
        if self._tracer is not None and trace.context is not None:
            self._tracer.ended(trace.context, report, trace.endpoint)
        if self._slow_s and report.duration_s >= self._slow_s:
            _log_slow(report)

    # ---------------------------------------------------------------- stages

    def stage_up(self, stage: str, hello: Hello) -> None:
        """A stage has connected: a new process of it, or the same one again."""
        before, self._pids[stage] = self._pids.get(stage, 0), hello.pid
        if stage == "scheduler":
            self._measured_until = float("-inf")
        self._add_to_all("connected again" if before == hello.pid else "started", stage, hello.pid)

    def stage_down(self, stage: str, hello: Hello) -> None:
        """A stage has exited, or its connection is lost."""
        now = self._clock()
        self._add_to_all("lost", stage, hello.pid)
        if stage == "scheduler":
            for trace in self._open.values():
                trace.lost_worker = 0  # another scheduler computes the request anew
                trace.suspend(now, is_anew=True)

    def pid(self, stage: str) -> int:
        """The process of a stage; 0: not connected."""
        return self._pids.get(stage, 0)

    def _add_to_all(self, name: str, stage: str, pid: int) -> None:
        now = self._clock()
        for trace in self._open.values():
            trace.add(now, name, stage=stage, pid=pid)

    # ---------------------------------------------------------------- the scheduler's events

    def on_frame(self, frame: Tokens, find: Callable[[str], RequestState | None]) -> None:
        """The events of a frame. `find(sequence id)`: its request. Those of requests that have ended are dropped."""
        now = self._clock()
        if self._is_remote:
            self._measure_offset(now, now - frame.at)
        for event in frame.events:
            at = min(now, (event.at or frame.at) + self._offset_s)
            if not event.sequence:
                for trace in self._open.values():
                    if trace.version == frame.model:
                        self._on_worker(trace, event, at)
                continue
            if event.sequence.startswith(EMBEDDING):
                found = self._open.get(event.sequence.partition("/")[0])
            else:
                request = find(event.sequence)
                found = request.trace if request is not None else None
            if found is None or (found.totals is not None and found.id.startswith(EMBEDDING)):
                continue
            if event.name in ("lost", "started"):
                self._on_worker(found, event, at)
            else:
                self._on_sequence(found, event, at)

    def _measure_offset(self, now: float, offset_s: float) -> None:
        """The frame with the least delay counts."""
        if offset_s < self._offset_s or now >= self._measured_until:
            self._offset_s, self._measured_until = offset_s, now + OFFSET_S

    def _on_worker(self, trace: RequestTrace, event: SequenceEvent, at: float) -> None:
        trace.add(at, event.name, dict(event.facts), stage="worker", pid=event.pid)
        if event.name == "lost":
            trace.lost_worker = event.pid
            trace.suspend(at)
        else:
            trace.lost_worker = 0
            trace.resume(at)

    def _on_sequence(self, trace: RequestTrace, event: SequenceEvent, at: float) -> None:
        name = event.name
        stage, pid = ("worker", event.pid) if event.pid else ("scheduler", self.pid("scheduler"))
        choice = -1 if trace.is_single else int(event.sequence.rpartition("/")[2])
        at = trace.latest = max(at, trace.latest)  # in the scheduler's order, whatever was measured of its clock
        trace.add(at, name, dict(event.facts), stage=stage, pid=pid, choice=choice)
        if event.pid not in (0, trace.lost_worker):  # a worker computes it
            trace.lost_worker = 0
        if name in ("queued", "preempted"):
            trace.advance(Phase.QUEUE, at)
        elif name == "admitted":
            trace.advance(Phase.PREFILL, at)
        elif name == "reattached":
            trace.advance(Phase.DECODE if event.facts.get("tokens") else Phase.QUEUE, at)
        elif name == "prefill" and event.facts.get("samples"):
            trace.advance(Phase.DECODE, at)

    # ---------------------------------------------------------------- reading

    def find(self, name: str) -> dict[str, Any]:
        """The timeline of a request, by its id, its X-Request-Id or the id of its API object. Raises `NotFound`."""
        suffix = name.rpartition("-")[2].rpartition("_")[2]
        now = self._clock()
        found = self._open.get(name) or self._open.get(f"req-{suffix}")
        if found is None:
            found = next((trace for trace in reversed(self._open.values()) if trace.client_id == name), None)
        report = found.report(now) if found is not None else self._kept.find(name)
        if report is None:
            raise NotFound(
                f"no timeline of request {name[:128]!r}: it is older than what is kept (tracing.buffer_mb), it was "
                "refused before it was tokenized, or there was none"
            )
        return described(report)


def _log_slow(report: Report) -> None:
    """The line that says where the time went."""
    fields: dict[str, Any] = {
        "request_id": report.id,
        "client_request_id": report.request_id if report.request_id != report.id else None,
        "model": report.model,
        "tenant": report.tenant,
        "session_id": report.session_id or None,
        "duration_ms": ms(report.duration_s),
        **{f"{phase}_ms": ms(seconds) for phase, seconds in report.phases_s.items()},
        "prompt_tokens": report.totals.prompt_tokens,
        "cached_tokens": report.totals.cached_tokens,
        "completion_tokens": report.totals.completion_tokens,
        "finish": report.totals.outcome,
        "restarts": sum(event.name == "started" for event in report.events),
    }
    if report.totals.error:
        fields["error"] = report.totals.error
    log.warning("slow request", extra=fields)
