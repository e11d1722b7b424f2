"""Spans made of timelines: what each stage did, and where the loss of a stage ends them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.gateway.http.text_endpoints import TEXT_ENDPOINTS
from stages.gateway.tracing.spans import ROUTES, HttpCall, Span, spans_of, spans_of_call
from stages.gateway.tracing.timeline import Event, Report, Totals

RECEIVED = 1_700_000_000.0
GATEWAY, TOKENIZER, SCHEDULER, WORKER, NEXT = 1, 2, 3, 4, 5
NAMES = [
    *("received", "model ready", "session", "tokenized", "journaled", "submitted", "queued", "admitted", "prefill"),
    *("first token", "preempted", "resubmitted", "reattached", "recovered", "decoded", "finished", "written", "lost"),
    *("started", "connected again", "client left", "detokenized"),
]


def report(*events: Event, duration_s: float = 10.0, totals: Totals | None = None) -> Report:
    totals = totals or Totals("finished", 35, 16, 8)
    return Report("req-1", "client", "t", "m", "", RECEIVED, duration_s, {"decode": 1.0}, totals, list(events), 0)


def begun(choice: int = -1) -> list[Event]:
    return [
        Event(0.0, "gateway", GATEWAY, "received"),
        Event(0.1, "gateway", GATEWAY, "parsed"),
        Event(1.0, "tokenizer", TOKENIZER, "tokenized", -1, {"ms": 500.0, "tokens": 35}),
        Event(1.1, "gateway", GATEWAY, "submitted", -1, {"sequences": 1}),
        Event(1.2, "scheduler", SCHEDULER, "queued", choice, {"ahead": 0}),
        Event(1.5, "scheduler", SCHEDULER, "admitted", choice, {"cached_tokens": 16, "kv_ms": 100.0}),
        Event(2.0, "worker", WORKER, "prefill", choice, {"begin": 16, "end": 30, "ms": 400.0, "samples": 0}),
        Event(2.5, "worker", WORKER, "prefill", choice, {"begin": 30, "end": 35, "ms": 300.0, "samples": 1}),
        Event(2.6, "gateway", GATEWAY, "first token", choice),
    ]


def times(spans: list[Span], name: str) -> list[tuple[float, float]]:
    return [(round(s.begin - RECEIVED, 6), round(s.end - RECEIVED, 6)) for s in spans if s.name == name]


def test_a_span_for_what_each_stage_did() -> None:
    ended = [
        Event(5.0, "gateway", GATEWAY, "decoded", -1, {"tokens": 8, "ms": 2400.0, "reason": "stop"}),
        Event(5.0, "gateway", GATEWAY, "finished", -1, {"tokens": 8}),
        Event(6.0, "gateway", GATEWAY, "written"),
    ]
    spans = spans_of(report(*begun(), *ended, duration_s=6.0), "chat", GATEWAY)
    root = spans[0]
    assert (root.name, root.parent, root.error) == ("POST /v1/chat/completions", -1, "")
    assert times(spans, root.name) == [(0.0, 6.0)]
    assert {s.name: (s.stage, s.pid) for s in spans[1:]} == {
        "admission": ("gateway", GATEWAY),
        "tokenize": ("tokenizer", TOKENIZER),
        "queue": ("scheduler", SCHEDULER),
        "kv pages": ("kv", 0),
        "prefill": ("worker", WORKER),
        "prefill step": ("worker", WORKER),
        "decode": ("worker", WORKER),
        "write": ("gateway", GATEWAY),
    }
    assert times(spans, "tokenize") == [(0.5, 1.0)]
    assert times(spans, "kv pages") == [(1.4, 1.5)]
    assert times(spans, "queue") + times(spans, "prefill") + times(spans, "decode") + times(spans, "write") == [
        *((1.2, 1.5), (1.5, 2.5), (2.5, 5.0), (5.0, 6.0))
    ]
    assert times(spans, "prefill step") == [(1.6, 2.0), (2.2, 2.5)]
    assert {spans[s.parent].name for s in spans if s.name == "prefill step"} == {"prefill"}
    (decode,) = [s for s in spans if s.name == "decode"]
    assert decode.attributes["starling.tokens"] == 8
    assert root.attributes["gen_ai.usage.output_tokens"] == 8


def test_the_loss_of_the_worker_ends_a_span_and_its_successor_goes_on() -> None:
    lost = [
        Event(3.0, "worker", WORKER, "lost"),
        Event(4.0, "worker", NEXT, "started"),
        Event(5.0, "gateway", GATEWAY, "decoded", -1, {"tokens": 8}),
    ]
    spans = spans_of(report(*begun(), *lost), "chat", GATEWAY)
    before, after = [s for s in spans if s.name == "decode"]
    assert (before.error, before.pid, after.error, after.pid) == ("worker lost", WORKER, "", NEXT)
    assert times(spans, "decode") == [(2.5, 3.0), (4.0, 5.0)]
    assert times(spans, "recovery") == [(3.0, 4.0)]


def test_the_loss_of_the_scheduler_begins_again() -> None:
    again = [
        Event(3.0, "scheduler", SCHEDULER, "lost"),
        Event(3.5, "scheduler", NEXT, "started"),
        *(Event(3.6, "gateway", GATEWAY, "resubmitted", choice, {"tokens": 2}) for choice in (0, 1)),
        *(Event(3.7, "scheduler", NEXT, "queued", choice) for choice in (0, 1)),
        *(Event(3.8, "scheduler", NEXT, "admitted", choice, {"kv_ms": 1.0}) for choice in (0, 1)),
        *(Event(4.0, "worker", WORKER, "prefill", choice, {"ms": 1.0, "samples": 1}) for choice in (0, 1)),
        *(Event(5.0, "gateway", GATEWAY, "decoded", choice, {"tokens": 8}) for choice in (0, 1)),
    ]
    first = sorted([*begun(0), *(e for e in begun(1) if e.choice == 1)], key=lambda event: event.at)
    spans = spans_of(report(*first, *again), "chat", GATEWAY)
    decodes = [s for s in spans if s.name == "decode"]
    assert [(s.attributes["starling.choice"], s.error) for s in decodes] == [
        *((0, "scheduler lost"), (1, "scheduler lost"), (0, ""), (1, ""))
    ]
    assert times(spans, "recovery") == [(3.0, 3.6)]
    assert times(spans, "queue")[-1] == (3.7, 3.8)


def test_a_worker_that_starts_before_a_sequence_is_queued_again_does_not_compute_it() -> None:
    """The scheduler's successor has the worker, and one of two sequences."""
    again = [
        Event(3.0, "scheduler", SCHEDULER, "lost"),
        *(Event(3.6, "gateway", GATEWAY, "resubmitted", choice, {"tokens": 2}) for choice in (0, 1)),
        Event(3.7, "scheduler", NEXT, "queued", 0),
        Event(3.8, "worker", WORKER, "started"),
        Event(4.0, "scheduler", NEXT, "queued", 1),
        *(Event(4.5, "worker", WORKER, "prefill", choice, {"ms": 1.0, "samples": 1}) for choice in (0, 1)),
        *(Event(5.0, "gateway", GATEWAY, "decoded", choice, {"tokens": 8}) for choice in (0, 1)),
    ]
    first = sorted([*begun(0), *(e for e in begun(1) if e.choice == 1)], key=lambda event: event.at)
    spans = spans_of(report(*first, *again), "chat", GATEWAY)
    decodes = [(s.attributes["starling.choice"], s.error) for s in spans if s.name == "decode"]
    assert decodes == [(0, "scheduler lost"), (1, "scheduler lost"), (0, ""), (1, "")]
    assert times(spans, "decode")[2:] == [(4.5, 5.0), (4.5, 5.0)]
    assert times(spans, "recovery") == [(3.0, 3.6)]


def test_a_worker_that_starts_does_not_end_the_recovery_from_the_loss_of_the_scheduler() -> None:
    again = [
        Event(3.0, "scheduler", SCHEDULER, "lost"),
        Event(3.5, "worker", WORKER, "started"),
        Event(3.6, "gateway", GATEWAY, "resubmitted", -1, {"tokens": 2}),
        Event(5.0, "gateway", GATEWAY, "decoded", -1, {"tokens": 8}),
    ]
    assert times(spans_of(report(*begun(), *again), "chat", GATEWAY), "recovery") == [(3.0, 3.6)]


def test_a_failed_request_ends_its_spans_with_its_code() -> None:
    totals = Totals("failed", 35, 0, 1, "TIMEOUT")
    failed = Event(4.0, "gateway", GATEWAY, "failed", -1, {"error": "TIMEOUT"})
    spans = spans_of(report(*begun(), failed, totals=totals), "generate", GATEWAY)
    assert {s.name: s.error for s in spans if s.error} == {"POST /v1/generate": "TIMEOUT", "decode": "TIMEOUT"}


def test_a_recovered_request_has_one_root_and_its_recovery() -> None:
    events = [
        Event(0.0, "gateway", 0, "received"),
        Event(2.0, "gateway", NEXT, "recovered"),
        Event(2.1, "gateway", NEXT, "submitted"),
        Event(2.2, "scheduler", SCHEDULER, "reattached", -1, {"tokens": 3}),
        Event(3.0, "gateway", NEXT, "decoded", -1, {"tokens": 8}),
    ]
    spans = spans_of(report(*events), "chat", NEXT)
    assert [s.name for s in spans] == ["POST /v1/chat/completions", "recovery", "decode"]
    assert times(spans, "recovery") == [(0.0, 2.1)]


def test_a_call_without_a_timeline_has_one_span() -> None:
    call = HttpCall("POST", "/v1/embeddings", 400, RECEIVED, 0.5, 1, "t", "", "INVALID_REQUEST")
    (span,) = spans_of_call(call)
    assert (span.name, span.error, span.attributes["error.type"]) == ("POST /v1/embeddings", "", "INVALID_REQUEST")
    (span,) = spans_of_call(HttpCall("POST", "/v1/embeddings", 503, RECEIVED, 0.5, 1))
    assert span.error == "503"


def test_every_endpoint_for_text_has_its_route() -> None:
    of_vectors = {name: f"/v1/{name}" for name in ("embeddings", "rerank", "score")}
    assert {one.name: one.path for one in TEXT_ENDPOINTS} | of_vectors == {
        name: path for name, (path, _) in ROUTES.items()
    }


events = st.builds(
    Event,
    st.floats(0, 10),
    st.sampled_from(["gateway", "tokenizer", "scheduler", "kv", "worker"]),
    st.integers(0, 9),
    st.sampled_from(NAMES),
    st.integers(-1, 3),
    st.fixed_dictionaries({}, optional={"ms": st.floats(0, 1e5), "samples": st.integers(0, 1), "tokens": st.just(1)}),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(events, max_size=40), st.sampled_from(["finished", "failed", "abandoned", "open"]))
def test_whatever_happened_spans_are_closed_and_within_the_request(several: list[Event], outcome: str) -> None:
    several.sort(key=lambda event: event.at)
    spans = spans_of(report(*several, totals=Totals(outcome)), "chat", GATEWAY)
    assert [s.parent for s in spans].count(-1) == 1
    for index, span in enumerate(spans):
        assert RECEIVED <= span.begin <= span.end <= RECEIVED + 10
        assert span.parent < index
    # A sequence is in one phase at a time.
    for choice in range(-1, 4):
        mark = choice if choice >= 0 else None
        phases = [s for s in spans if s.name in ("queue", "prefill", "decode")]
        own = [s for s in phases if s.attributes.get("starling.choice") == mark]
        assert all(before.end <= after.begin for before, after in pairwise(own))
