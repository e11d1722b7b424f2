"""The histograms of requests: lengths, and the times of their phases, each as it was."""

from __future__ import annotations

import pytest

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.observe.metrics import MAX_SERIES, Metrics
from pipeline.protocol import messages as m
from stages.gateway.metrics import GatewayMetrics
from stages.gateway.requests.readers import FanOutSink
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.response_cache import HIT
from stages.gateway.requests.state import RequestState
from tests.gateway.peers import MODEL, make_token_bytes
from tests.gateway.request_states import make_state

PROMPT = 6  # tokens
TIMES = ("prefill_seconds", "decode_seconds", "inference_seconds")


class World:
    """A relay with its metrics, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 10.0
        self.numbers = Metrics("gateway", None, clock=lambda: self.now)
        self.metrics = GatewayMetrics(self.numbers, lambda: self.now, lambda: 0)
        self.relay = Relay(lambda frame: True, lambda: self.now, self.metrics.ended)
        self.relay.vocabularies[MODEL] = make_token_bytes()

    def open(self, name: str = "req-1", *, choices: int = 1) -> RequestState:
        generation = GenerationRequest(endpoint="generate", model=MODEL, n=choices)
        request = make_state(name, generation, prompt=bytes(4 * PROMPT), started_at=self.now)
        request.sink = FanOutSink()
        self.relay.open(request)
        return request

    def receive(
        self, after_s: float, sequence: str, start: int = 0, count: int = 0, finish: str = "", *, starts: bool = False
    ) -> None:
        """A frame comes, `after_s` after the one before."""
        self.now += after_s
        new = [m.SequenceTokens(sequence, start, tuple(range(65, 65 + count)), finish=finish)] if count else []
        self.relay.on_tokens(m.Tokens(MODEL, 0, new, started=(sequence,) if starts else ()))

    def counted(self, name: str) -> tuple[int, float]:
        """The number of values in a histogram, and their sum."""
        for series in self.numbers.snapshot().families.get(f"starling_{name}", []):
            assert series.labels == (MODEL,)
            return sum(series.counts), series.value
        return 0, 0.0

    def longest_context(self) -> float:
        return self.numbers.snapshot().families["starling_context_tokens_max"][0].value


def test_a_request_is_divided_into_its_phases() -> None:
    world = World()
    world.open()
    world.receive(1.0, "req-1/0", starts=True)  # in the queue for 1 s
    world.receive(2.0, "req-1/0", 0, 1)
    world.receive(0.5, "req-1/0", 1, 1)
    world.receive(0.0, "req-1/0", starts=True)  # its scheduler was restarted: the phase goes on
    world.receive(3.5, "req-1/0", 2, 2, "length")
    assert [world.counted(name) for name in TIMES] == [(1, 2.0), (1, 4.0), (1, 6.0)]
    assert world.counted("end_to_end_seconds") == (1, 7.0)
    assert world.counted("request_prompt_tokens") == (1, PROMPT)
    assert world.counted("request_computed_tokens") == (1, PROMPT)
    assert world.counted("request_output_tokens") == world.counted("request_longest_output_tokens") == (1, 4)
    assert world.counted("request_max_tokens") == (1, 40)
    assert world.counted("request_choices") == (1, 1)
    assert world.longest_context() == PROMPT + 4


def test_choices_are_sequences_of_one_request() -> None:
    world = World()
    world.open(choices=2)
    for index, count in enumerate((2, 5)):
        world.receive(1.0, f"req-1/{index}", starts=True)
        world.receive(1.0, f"req-1/{index}", 0, count, "length")
    assert world.counted("prefill_seconds") == (2, 2.0)
    assert world.counted("end_to_end_seconds") == (1, 4.0)
    assert world.counted("request_prompt_tokens") == (1, PROMPT)
    assert world.counted("request_output_tokens") == (1, 7)
    assert world.counted("request_longest_output_tokens") == (1, 5)
    assert world.counted("request_choices") == (1, 2)


def test_a_prefill_that_ends_in_the_frame_that_begins_it_takes_no_time() -> None:
    world = World()
    world.open()
    world.receive(1.0, "req-1/0", 0, 1, starts=True)
    world.receive(1.0, "req-1/0", 1, 1, "length")
    assert [world.counted(name) for name in TIMES] == [(1, 0.0), (1, 1.0), (1, 1.0)]


def test_the_longest_context_stays_after_shorter_ones() -> None:
    world = World()
    for number, count in enumerate((3, 9, 2)):
        world.open(f"req-{number}")
        world.receive(1.0, f"req-{number}/0", 0, count, "length", starts=True)
    assert world.longest_context() == PROMPT + 9


def test_times_that_another_process_has_seen_are_not_counted() -> None:
    """The request began before this gateway, or its first tokens came from another server: lengths are known."""
    world = World()
    request = make_state(prompt=bytes(4 * PROMPT), started_at=world.now)
    request.sink, request.is_recovered = FanOutSink(), True
    world.relay.open(request)
    world.receive(1.0, "req-1/0", starts=True)
    world.receive(1.0, "req-1/0", 0, 3, "length")
    assert [world.counted(name) for name in (*TIMES, "end_to_end_seconds")] == [(0, 0.0)] * 4
    assert world.counted("request_output_tokens") == (1, 3)
    request = make_state("req-2", prompt=bytes(4 * PROMPT), started_at=world.now)
    request.sink = FanOutSink()
    request.sequences[0].tokens, request.sequences[0].first_token_at = [65, 66], world.now
    world.relay.open(request)
    world.receive(1.0, "req-2/0", starts=True)
    world.receive(1.0, "req-2/0", 2, 1, "length")
    assert [world.counted(name) for name in TIMES] == [(0, 0.0)] * 3
    assert world.counted("end_to_end_seconds") == (1, 2.0)


def test_a_request_that_had_no_answer_and_a_stored_one() -> None:
    world = World()
    request = world.open()
    world.now += 1.0
    world.relay.abandon(request)
    names = ("end_to_end_seconds", "request_prompt_tokens", "prefill_seconds")
    assert [world.counted(name) for name in names] == [(0, 0.0)] * 3
    request = world.open("req-2")
    request.response_cache = HIT
    world.receive(0.25, "req-2/0", 0, 3, "length")
    assert world.counted("end_to_end_seconds") == (1, pytest.approx(0.25))
    assert world.counted("prefill_seconds") == (0, 0.0)  # it never left a queue


def test_adapters_that_have_left_make_room_for_others() -> None:
    world = World()
    for number in range(MAX_SERIES + 1):
        name = f"{MODEL}:a{number}"
        world.metrics.sample_models([name], [MODEL, name])
        world.numbers.add("starling_model_requests_total", name)
        world.metrics.sample_models([], [MODEL, name])
        for family in ("starling_model_requests_in_flight", "starling_model_requests_total"):
            assert [one.labels for one in world.numbers.snapshot().families[family]] == [(name,)]
        world.metrics.sample_models([name], [MODEL])  # it has left, and finishes its requests
        assert [one.value for one in world.numbers.snapshot().families["starling_model_requests_in_flight"]] == [1.0]
        world.metrics.sample_models([], [MODEL])
