"""W3C Trace Context: which headers continue a trace, which begin one, and which traces are sampled."""

from __future__ import annotations

import pytest

from stages.gateway.tracing.trace_context import MAX_STATE

pytest.importorskip("opentelemetry.sdk")

from stages.gateway.tracing.trace_context import ContextReader

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("parent", "is_sampled"),
    [
        (PARENT, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-ff", True),  # unknown flags are not passed on
        (f" {PARENT} ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_a_valid_parent_is_continued(parent: str, is_sampled: bool) -> None:
    context = ContextReader(0.0).read([parent], [])
    assert (context.trace_id, context.parent_id, context.is_sampled) == (TRACE, SPAN, is_sampled)
    assert context.span_id not in (SPAN, "0" * 16)
    assert context.headers == {"traceparent": f"00-{TRACE}-{context.span_id}-{int(is_sampled):02x}"}


@pytest.mark.parametrize(
    "parents",
    [
        [],
        [""],
        ["garbage"],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE.upper()}-{SPAN}-01"],
        [f"00-{TRACE}-{SPAN}-01-"],
        [f"00-{TRACE}-{SPAN}-01.x"],
        [f"cc-{TRACE}-{SPAN}-01.x"],
        [f"00-{TRACE}-{SPAN}-0"],
        [f"00-{TRACE[:-1]}-{SPAN}-01"],
        [PARENT, PARENT],
    ],
)
def test_an_invalid_parent_begins_a_trace(parents: list[str]) -> None:
    """Its tracestate is not passed on either."""
    reader = ContextReader(1.0)
    first, second = reader.read(parents, ["a=1"]), reader.read(parents, ["a=1"])
    assert len({TRACE, first.trace_id, second.trace_id}) == 3
    assert (first.parent_id, first.state, first.is_sampled) == ("", "", True)


@pytest.mark.parametrize(
    ("states", "kept"),
    [
        (["a=1,b=2"], "a=1,b=2"),
        (["a=1", "t@v=2"], "a=1,t@v=2"),
        ([""], ""),
        (["A=1"], ""),
        (["a=1,a=2"], ""),
        ([",".join(f"k{i}=1" for i in range(33))], ""),
        ([",".join(f"k{i}={'x' * 200}" for i in range(1 + MAX_STATE // 200))], ""),
    ],
)
def test_a_valid_state_is_passed_on(states: list[str], kept: str) -> None:
    context = ContextReader(1.0).read([PARENT], states)
    assert (context.trace_id, context.state) == (TRACE, kept)
    assert ("tracestate" in context.headers) == bool(kept)


def test_the_ratio_is_of_traces_that_begin_here() -> None:
    contexts = [ContextReader(0.25).read([], []) for _ in range(2000)]
    assert 300 < sum(context.is_sampled for context in contexts) < 700  # 500 +- 10 standard deviations
    assert not any(ContextReader(0.0).read([], []).is_sampled for _ in range(100))
