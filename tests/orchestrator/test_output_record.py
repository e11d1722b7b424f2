"""The record of output tokens: what comments name, in any grouping, each token once."""

from __future__ import annotations

from array import array
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.api.output_tokens import comment, decode_output
from stages.orchestrator.event_cutter import EventCutter
from stages.orchestrator.output_record import MAX_CHOICES, UNREAD_BYTES, OutputRecord

CHOICES = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30), min_size=1, max_size=3)


@given(CHOICES, st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_tokens_are_recorded_once_however_they_come(choices: list[list[int]], data: st.DataObject) -> None:
    """Also when an engine begins again, and when a comment arrives in parts."""
    cutter = EventCutter()
    cutter.output.version = "v"
    sent = b""
    for _ in range(2):
        for number, tokens in enumerate(choices):
            cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(tokens) - 1)), max_size=4)) | {0, len(tokens)})
            for begin, end in pairwise(cuts):
                if tokens[begin:end]:
                    sent += comment(number, begin, 3, tokens[begin:end]) + b"id: req-1:%d\ndata: {}\n\n" % end
    at = 0
    while at < len(sent):
        size = data.draw(st.integers(1, 200))
        assert b"tokens" not in cutter.feed(sent[at : at + size])
        at += size
    output = decode_output(cutter.output.encode())
    assert [array("i", one).tolist() for one in output.tokens] == choices
    assert output.cached == [3] * len(choices) and output.version == "v"
    assert cutter.output.nbytes == 4 * sum(map(len, choices))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)), max_size=600)
)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_comments_that_are_read_together_say_what_each_of_them_says(steps: list[tuple[int, list[int]]]) -> None:
    together, singly = OutputRecord(), OutputRecord()
    for choice, tokens in steps:
        counts = [*singly.counts(), 0, 0, 0]
        block = comment(choice, counts[choice], choice, tokens).removesuffix(b"\n\n")
        together.add(block)
        singly.add(block)
        assert singly.n_tokens and together.nbytes < 4 * 5 * len(steps) + 2 * UNREAD_BYTES
    together.version = singly.version = "v"
    assert together.encode() == singly.encode()


def test_what_does_not_follow_is_left_out() -> None:
    record = OutputRecord()
    assert record.encode() == b""
    record.add(b": tokens 0 5 0 1,2")
    record.add(b": tokens %d 0 0 1" % MAX_CHOICES)
    record.add(b": tokens 0 0 0 4294967296")
    record.add(b": tokens of something else")
    record.add(b": loading a model")
    record.add(b": tokens 0 00 0 01")  # what is no JSON is read, too
    assert record.n_tokens == 1
    assert record.encode() == b""  # of no version
    record.version = "v"
    record.add(b": tokens 0 1 0 7")
    assert decode_output(record.encode()).tokens == [array("i", [1, 7]).tobytes()]
