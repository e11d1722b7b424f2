"""The histogram of gaps between tokens: each gap is in it, and none that no client has waited for."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from pipeline.observe.metric_families import FAMILIES
from pipeline.observe.metrics import Metrics
from pipeline.protocol import messages as m
from stages.gateway.metrics import GAPS, GatewayMetrics
from stages.gateway.requests.readers import FanOutSink
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.response_cache import HIT
from stages.gateway.requests.state import RequestState
from tests.gateway.peers import MODEL, make_token_bytes
from tests.gateway.request_states import make_state

TPOT = "starling_time_per_output_token_seconds"


class World:
    """A relay with its metrics, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 10.0
        self.numbers = Metrics("gateway", None, clock=lambda: self.now)
        metrics = GatewayMetrics(self.numbers, lambda: self.now, lambda: 0)
        self.relay = Relay(lambda frame: True, lambda: self.now, metrics.ended)
        self.relay.count_gaps = metrics.gaps
        self.relay.vocabularies[MODEL] = make_token_bytes()
        self.exemplars = metrics.exemplars

    def open(self, name: str = "req-1", *, is_probe: bool = False) -> RequestState:
        request = make_state(name)
        request.sink, request.is_probe = FanOutSink(), is_probe
        self.relay.open(request)
        return request

    def tokens(self, after_s: float, start: int, count: int, name: str = "req-1", finish: str = "") -> None:
        """A frame with `count` tokens of a sequence comes, `after_s` after the one before."""
        self.now += after_s
        new = m.SequenceTokens(f"{name}/0", start, tuple(range(65, 65 + count)), finish=finish)
        self.relay.on_tokens(m.Tokens(MODEL, start, [new]))

    def counted(self, name: str = GAPS) -> tuple[dict[float, int], float]:
        """Counts by the upper bounds of buckets that are not empty, and the sum."""
        for series in self.numbers.snapshot().families.get(name, []):
            assert series.labels == (MODEL,)
            bounds = (*FAMILIES[name].bounds, float("inf"))
            return {bounds[i]: count for i, count in enumerate(series.counts) if count}, series.value
        return {}, 0.0


def bucket(value: float) -> float:
    bounds = FAMILIES[GAPS].bounds
    return bounds[bisect_left(bounds, value)]


def test_each_gap_is_counted_and_not_their_mean() -> None:
    world = World()
    world.open()
    world.tokens(0.7, 0, 1)  # the time to the first token is none
    assert world.counted() == ({}, 0.0)
    for start, gap in enumerate((0.02, 0.02, 3.0, 0.02), start=1):
        world.tokens(gap, start, 1)
    # While the stream runs: three short gaps and a long one. Their mean is 0.765 s, which no gap was near to.
    counts, total = world.counted()
    assert counts == {bucket(0.02): 3, bucket(3.0): 1}
    assert total == pytest.approx(3.06)
    world.tokens(0.02, 5, 1, finish="length")
    assert world.counted()[0] == {bucket(0.02): 4, bucket(3.0): 1}
    assert list(world.counted(TPOT)[0]) == [bucket(3.08 / 5)]
    (exemplar,) = world.exemplars.of(GAPS, (MODEL,)).values()
    assert exemplar.labels == {"request_id": "req-1"}
    assert exemplar.value == pytest.approx(3.0)


def test_tokens_that_come_together_have_no_gap_between_them() -> None:
    world = World()
    world.open()
    world.tokens(0.5, 0, 3)
    world.tokens(0.3, 3, 4)
    assert world.counted() == ({bucket(0.0): 2 + 3, bucket(0.3): 1}, pytest.approx(0.3))


def test_tokens_that_come_again_count_once() -> None:
    world = World()
    world.open()
    world.tokens(0.5, 0, 2)
    world.tokens(0.2, 0, 2)  # a scheduler that was restarted sends what was delivered
    world.tokens(0.2, 1, 2)  # one of these is new
    assert world.counted() == ({bucket(0.0): 1, bucket(0.4): 1}, pytest.approx(0.4))


def test_choices_have_gaps_of_their_own_and_a_self_test_has_none() -> None:
    world = World()
    world.open("req-1")
    world.open("req-2")
    world.open("req-3", is_probe=True)
    for name in ("req-1", "req-2", "req-3"):
        world.tokens(0.1, 0, 1, name)
    for name in ("req-1", "req-2", "req-3"):
        world.tokens(0.1, 1, 1, name)
    assert world.counted() == ({bucket(0.3): 2}, pytest.approx(0.6))


def test_a_gap_across_the_death_of_the_gateway_is_not_counted() -> None:
    """The first tokens came to the predecessor: its clock is not this one's, and its reader has reconnected."""
    world = World()
    request = make_state()
    request.sink = FanOutSink()
    request.sequences[0].tokens = [65, 66]
    request.sequences[0].first_token_at = world.now
    world.relay.open(request)
    world.tokens(5.0, 2, 1)
    assert world.counted() == ({}, 0.0)
    world.tokens(0.2, 3, 1)
    assert world.counted() == ({bucket(0.2): 1}, pytest.approx(0.2))


def test_a_stored_answer_has_no_time_per_token() -> None:
    world = World()
    request = world.open()
    request.response_cache = HIT
    world.tokens(0.5, 0, 3, finish="length")
    assert world.counted(TPOT) == ({}, 0.0)
