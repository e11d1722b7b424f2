"""The spans of a request, made of its timeline: one for the request, and below it one for what each stage did.

    request                      gateway, the whole time
      admission                  gateway, until it is submitted
        wait for model           gateway
        session                  kv
        tokenize                 tokenizer
      queue                      scheduler
      kv pages                   kv, until its pages are granted
      prefill                    worker
        prefill step             worker, one for each chunk
      decode                     worker
      recovery                   gateway, from the loss of a stage until its successor has the request
      write                      gateway, after the outcome

When the scheduler or the worker is lost, the spans that it was in end there with an error; what its successor does are
further spans. A request of several sequences has queue, prefill and decode of each one. Pure: times in, times out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stages.gateway.tracing.timeline import Event, Report

# Paths of the endpoints with timelines (for text by `GenerationRequest.endpoint`), and the names of semantic
# conventions for them.
ROUTES = {
    "generate": ("/v1/generate", "text_completion"),
    "chat": ("/v1/chat/completions", "chat"),
    "completions": ("/v1/completions", "text_completion"),
    "messages": ("/v1/messages", "chat"),
    "responses": ("/v1/responses", "chat"),
    "embeddings": ("/v1/embeddings", "embeddings"),
    "rerank": ("/v1/rerank", "embeddings"),
    "score": ("/v1/score", "embeddings"),
}
ADMISSION_STEPS = {"model ready": "wait for model", "session": "session", "tokenized": "tokenize"}
COMPUTING = ("scheduler", "worker")  # stages whose loss interrupts a request
Attributes = dict[str, Any]


class Span(msgspec.Struct):
    """One span. Times are s since 1970."""

    name: str
    stage: str
    pid: int  # 0: not known
    begin: float
    end: float = 0.0
    parent: int = 0  # index in the list of the request's spans; the first one is the request's own
    error: str = ""  # a code of `pipeline.errors`, or what was lost
    attributes: Attributes = {}
    events: list[tuple[float, str, Attributes]] = []


class HttpCall(msgspec.Struct):
    """A request without a timeline: one that was refused, or an endpoint that computes nothing."""

    method: str
    route: str
    status: int
    received: float  # s since 1970
    duration_s: float
    pid: int
    tenant: str = ""
    client_id: str = ""  # X-Request-Id
    error: str = ""  # code
    request_id: str = ""  # of the request that it reads or cancels


def spans_of_call(call: HttpCall) -> list[Span]:
    """The one span of a request without a timeline."""
    attributes = {
        "http.request.method": call.method,
        "http.route": call.route,
        "http.response.status_code": call.status,
        "starling.tenant": call.tenant,
        "starling.request.id": call.request_id,
        "starling.client.request.id": call.client_id,
        "error.type": call.error,
    }
    is_failed = call.status >= 500
    return [
        Span(
            f"{call.method} {call.route}",
            "gateway",
            call.pid,
            call.received,
            call.received + call.duration_s,
            error=(call.error or str(call.status)) if is_failed else "",
            attributes={name: value for name, value in attributes.items() if value != ""},
        )
    ]


def spans_of(report: Report, endpoint: str, pid: int) -> list[Span]:
    """The spans of a request that has ended; the first one is its own. `pid`: of this gateway."""
    return _Builder(report, endpoint, pid).build()


class _Builder:
    def __init__(self, report: Report, endpoint: str, pid: int) -> None:
        self._report = report
        self._origin = report.received
        self._end = report.received + report.duration_s
        self._spans = [self._root(endpoint, pid)]
        self._pid = pid
        self._open: dict[int, Span] = {}  # by choice: its queue, prefill or decode
        self._interrupted: dict[int, str] = {}  # by choice: the span that the worker's loss has ended
        self._admission: Span | None = None
        self._recovery: Span | None = None
        self._is_resubmitting = False  # the scheduler was lost, and its successor has no sequence of the request yet
        self._worker_pid = next((event.pid for event in report.events if event.stage == "worker" and event.pid), 0)

    def _root(self, endpoint: str, pid: int) -> Span:
        report, totals = self._report, self._report.totals
        route, operation = ROUTES.get(endpoint, ("", endpoint))
        attributes: Attributes = {
            "http.request.method": "POST",
            "http.route": route,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "starling",
            "gen_ai.request.model": report.model,
            "gen_ai.usage.input_tokens": totals.prompt_tokens,
            "gen_ai.usage.output_tokens": totals.completion_tokens,
            "starling.cached_tokens": totals.cached_tokens,
            "starling.request.id": report.id,
            "starling.client.request.id": report.request_id,
            "starling.tenant": report.tenant,
            "starling.outcome": totals.outcome,
            **{f"starling.{phase}_s": round(seconds, 6) for phase, seconds in report.phases_s.items()},
        }
        if report.omitted:
            attributes["starling.omitted_events"] = report.omitted
        if totals.error:
            attributes["error.type"] = totals.error
        error = "" if totals.outcome == "finished" else totals.error or totals.outcome
        return Span(f"POST {route}", "gateway", pid, self._origin, self._end, -1, error, attributes, [])

    def build(self) -> list[Span]:
        for event in self._report.events:
            self._take(event, self._origin + event.at)
        for span in self._spans:
            if not span.end:
                self._close(span, self._end, "" if span.name == "write" else self._spans[0].error)
        return self._spans

    # ---------------------------------------------------------------- events

    def _take(self, event: Event, at: float) -> None:
        name, choice = event.name, event.choice
        match name:
            case "received":
                if event.pid:  # otherwise a predecessor of this gateway received it
                    self._admission = self._add("admission", "gateway", event.pid, at)
            case "model ready" | "session" | "tokenized":
                parent = self._index(self._admission)
                step = self._add(ADMISSION_STEPS[name], event.stage, event.pid, at, parent, event.facts)
                self._begin_earlier(step, at, event.facts.get("ms"))
            case "submitted" | "answered from the cache":
                self._note(event, at)
                self._end_recovery(at)
                if self._admission is not None:
                    self._close(self._admission, at)
            case "recovered":
                self._note(event, at)
                self._recovery = self._add("recovery", "gateway", event.pid, self._origin)
            case "queued":
                self._enter(choice, "queue", "scheduler", event.pid, at, event.facts)
            case "preempted":
                self._note(event, at)
                self._enter(choice, "queue", "scheduler", event.pid, at, event.facts)
            case "resubmitted":
                self._note(event, at)
                self._end_recovery(at)
            case "reattached":
                self._note(event, at)
                self._end_recovery(at)
                is_decoding = bool(event.facts.get("tokens"))
                if is_decoding:
                    self._enter(choice, "decode", "worker", self._worker_pid, at, {})
                else:
                    self._enter(choice, "queue", "scheduler", event.pid, at, {})
            case "admitted":
                pages = self._add("kv pages", "kv", 0, at, 0, _of_choice(choice))
                self._begin_earlier(pages, at, event.facts.get("kv_ms"))
                self._enter(choice, "prefill", "worker", self._worker_pid, at, event.facts)
            case "prefill":
                self._prefilled(event, at)
            case "first token":
                self._note(event, at)
                self._enter(choice, "decode", "worker", self._worker_pid, at, {})
            case "decoded":
                self._interrupted.pop(choice, None)
                span = self._open.pop(choice, None) or self._add("decode", "worker", self._worker_pid, at)
                span.attributes = {**span.attributes, **_attributes({**_of_choice(choice), **event.facts})}
                self._close(span, at)
            case "detokenized" | "written" | "parsed":
                pass  # in the phases, in the end, and inside the admission
            case "finished" | "failed" | "abandoned":
                self._end_recovery(at)
                self._add("write", "gateway", event.pid, at)
            case "lost" | "started" | "connected again":
                self._note(event, at)
                self._on_stage(event, at)
            case _:
                self._note(event, at)

    def _prefilled(self, event: Event, at: float) -> None:
        self._end_recovery(at)
        current = self._open.get(event.choice)
        facts = {**_of_choice(event.choice), **event.facts}
        step = self._add("prefill step", "worker", event.pid, at, self._index(current), facts)
        self._begin_earlier(step, at, event.facts.get("ms"))
        if event.facts.get("samples"):
            self._enter(event.choice, "decode", "worker", event.pid, at, {})

    def _on_stage(self, event: Event, at: float) -> None:
        if event.stage not in COMPUTING:
            return
        if event.name == "lost":
            for choice, span in self._open.items():
                self._close(span, at, f"{event.stage} lost")
                self._interrupted[choice] = span.name
            self._open.clear()
            if self._interrupted and self._recovery is None:
                attributes = {"starling.lost_stage": event.stage, "starling.lost_pid": event.pid}
                self._recovery = self._add("recovery", "gateway", self._pid, at, 0, attributes)
            if event.stage == "scheduler":  # its successor queues the sequences anew, perhaps after it has a worker
                self._interrupted.clear()
                self._is_resubmitting = True
        elif event.stage == "worker":
            self._worker_pid = event.pid
            if not self._is_resubmitting:
                self._end_recovery(at)
            interrupted, self._interrupted = self._interrupted, {}
            for choice, name in interrupted.items():
                stage, pid = ("scheduler", 0) if name == "queue" else ("worker", event.pid)
                self._enter(choice, name, stage, pid, at, {})

    # ---------------------------------------------------------------- spans

    def _add(
        self, name: str, stage: str, pid: int, begin: float, parent: int = 0, facts: Attributes | None = None
    ) -> Span:
        span = Span(name, stage, pid, begin, 0.0, parent, "", _attributes(facts or {}), [])
        self._spans.append(span)
        return span

    def _begin_earlier(self, span: Span, end: float, took_ms: Any) -> None:
        """The span ends at `end` and took so long, as far as the request is that old."""
        span.begin = max(self._origin, end - float(took_ms or 0.0) / 1000)
        span.end = end

    def _enter(self, choice: int, name: str, stage: str, pid: int, at: float, facts: Attributes) -> None:
        """A sequence enters a phase, if it is not in it: its span before ends."""
        current = self._open.get(choice)
        if current is not None and current.name == name:
            return
        if current is not None:
            self._close(current, at)
        self._interrupted.pop(choice, None)
        self._open[choice] = self._add(name, stage, pid, at, 0, {**_of_choice(choice), **facts})

    def _close(self, span: Span, at: float, error: str = "") -> None:
        span.end = max(at, span.begin)
        span.error = error

    def _end_recovery(self, at: float) -> None:
        self._is_resubmitting = False
        if self._recovery is not None:
            self._close(self._recovery, at)
            self._recovery = None

    def _index(self, span: Span | None) -> int:
        return 0 if span is None else next(i for i, one in enumerate(self._spans) if one is span)

    def _note(self, event: Event, at: float) -> None:
        facts = {"stage": event.stage, "pid": event.pid, **_of_choice(event.choice), **event.facts}
        self._spans[0].events.append((at, event.name, _attributes(facts)))


def _of_choice(choice: int) -> Attributes:
    return {"choice": choice} if choice >= 0 else {}


def _attributes(facts: Attributes) -> Attributes:
    """Facts of a timeline under names of their own."""
    return {name if "." in name else f"starling.{name}": value for name, value in facts.items()}
