"""Timelines: phases add up, events are bounded, and ended ones are kept within the bounds of tenant and total."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.gateway.tracing.kept import ENTRY_BYTES, KeptTimelines
from stages.gateway.tracing.timeline import MAX_EVENTS, Fact, Phase, Report, RequestTrace, Totals

MB = 1 << 20


def make_report(name: str, tenant: str = "t", events: int = 3, client_id: str = "", received: float = 1.0) -> Report:
    trace = RequestTrace(name, 10.0, tenant=tenant, model="m", client_id=client_id, received=received, pid=1)
    for at in range(events):
        trace.add(10.0 + at, "event", {"n": at})
    trace.end(20.0, Totals("finished"))
    return trace.report(21.0)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "advance", "suspend", "resume"]),
            st.sampled_from(list(Phase)[:4]),
            st.floats(-5, 50),
        ),
        max_size=20,
    ),
    st.floats(0, 10),
    st.floats(0, 10),
)
def test_phases_add_up_whatever_happens(changes: list[tuple[str, Phase, float]], text_s: float, write_s: float) -> None:
    """Also if events of another process arrive late, and however long text and writing took."""
    trace = RequestTrace("req-1", 100.0)
    trace.detokenize_s, trace.write_s = text_s, write_s
    latest = 100.0
    for how, phase, at in changes:
        latest = max(latest, 100 + at)
        if how in ("enter", "advance"):
            getattr(trace, how)(phase, 100 + at)
        else:
            getattr(trace, how)(100 + at)
    phases = trace.phases_s(latest + 1)
    assert sum(phases.values()) == pytest.approx(latest + 1 - 100)
    assert min(phases.values()) >= 0
    assert sorted(phases) == sorted(phase.name.lower() for phase in Phase)


def test_recovery_is_a_phase_of_its_own() -> None:
    trace = RequestTrace("req-1", 0.0)
    trace.enter(Phase.QUEUE, 1.0)
    trace.advance(Phase.PREFILL, 3.0)
    trace.advance(Phase.DECODE, 6.0)
    trace.suspend(10.0)
    trace.resume(15.0)
    trace.end(16.0, Totals("finished"))
    spent = trace.phases_s(18.0)
    assert spent == {
        "admission": 1.0,
        "queue": 2.0,
        "prefill": 3.0,
        "decode": 5.0,
        "recovery": 5.0,
        "detokenize": 0.0,
        "write": 2.0,
    }


def test_a_request_of_several_sequences_is_where_the_furthest_is() -> None:
    trace = RequestTrace("req-1", 0.0)
    trace.is_single = False
    trace.enter(Phase.QUEUE, 1.0)
    trace.advance(Phase.DECODE, 2.0)
    trace.advance(Phase.PREFILL, 3.0)  # its second sequence
    assert trace.phase is Phase.DECODE
    trace.suspend(4.0)
    trace.advance(Phase.QUEUE, 5.0)  # submitted to the scheduler's successor
    assert trace.phase is Phase.QUEUE


def test_a_request_that_is_computed_anew_is_in_the_queue_until_it_is_computed() -> None:
    """Also if the scheduler's successor has a worker before it has the request."""
    trace = RequestTrace("req-1", 0.0)
    trace.is_single = False
    trace.enter(Phase.QUEUE, 1.0)
    trace.advance(Phase.DECODE, 2.0)
    trace.suspend(4.0)  # the worker
    trace.suspend(5.0, is_anew=True)  # the scheduler
    trace.resume(6.0)
    assert trace.phase is Phase.QUEUE
    trace.advance(Phase.QUEUE, 7.0)
    trace.advance(Phase.PREFILL, 8.0)
    assert trace.phase is Phase.PREFILL


def test_events_are_bounded_and_prompt_chunks_are_joined() -> None:
    trace = RequestTrace("req-1", 0.0)
    n = 3 * MAX_EVENTS
    for at in range(n):
        facts: dict[str, Fact] = {"begin": at * 10, "end": at * 10 + 10, "ms": 0.5}
        trace.add(float(at), "prefill", facts, stage="worker", pid=7)
    trace.add(float(n), "first token")
    report = trace.report(n + 1.0)
    assert len(report.events) == MAX_EVENTS
    assert report.omitted == 1
    last = report.events[-1].facts
    assert (last["begin"], last["end"], last["chunks"]) == ((MAX_EVENTS - 1) * 10, n * 10, n - MAX_EVENTS + 1)
    assert last["ms"] == pytest.approx(0.5 * (n - MAX_EVENTS + 1))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.integers(0, 40)), max_size=80),
    st.integers(1000, 20_000),
    st.integers(1000, 8000),
)
def test_what_is_kept_is_bounded(added: list[tuple[str, int, int]], total: int, of_tenant: int) -> None:
    kept = KeptTimelines(total, of_tenant)
    for tenant, number, events in added:
        kept.add(make_report(f"req-{tenant}{number}", tenant, events))
        assert kept.bytes <= total
        assert len(kept) * ENTRY_BYTES <= kept.bytes
        for one in "abc":
            sizes = [len(entry[1]) + ENTRY_BYTES for entry in kept._entries.get(one, {}).values()]
            assert sum(sizes) == kept._used.get(one, 0) <= of_tenant


def test_a_tenant_with_many_requests_costs_others_none() -> None:
    kept = KeptTimelines(1 << 16, 1 << 14)
    kept.add(make_report("req-quiet", "quiet"))
    for number in range(1000):
        kept.add(make_report(f"req-{number}", "busy"))
    for tenant in range(100):
        kept.add(make_report(f"req-x{tenant}", f"x{tenant}"))
    assert kept.find("req-quiet") is not None
    assert kept.find("req-0") is None
    assert kept.find("req-999") is not None


def test_a_request_has_several_names() -> None:
    kept = KeptTimelines(MB, MB)
    kept.add(make_report("req-12ab", "t", client_id="mine", received=1.0))
    kept.add(make_report("req-34cd", "u", client_id="mine", received=2.0))
    for name in ("req-12ab", "chatcmpl-12ab", "resp_12ab", "12ab"):
        found = kept.find(name)
        assert found is not None
        assert found.id == "req-12ab"
    latest = kept.find("mine")
    assert latest is not None
    assert latest.id == "req-34cd"
    assert kept.find("req-") is None


def test_nothing_is_kept_without_a_buffer() -> None:
    kept = KeptTimelines(0, MB)
    kept.add(make_report("req-1"))
    assert len(kept) == kept.bytes == 0
