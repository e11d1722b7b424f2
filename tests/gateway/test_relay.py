"""The relay: crashes and lost frames change no character of the text, and every request ends exactly once."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.api.requests.tool_fields import ToolUse
from pipeline.errors import StarlingError
from pipeline.protocol import messages as m
from stages.gateway.requests.relay import OVERTIME_S, RESUBMIT_AFTER_S, Relay
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase, SequenceState
from tests.gateway.peers import EOS, MODEL, Generator, make_token_bytes, output, score_words, text_of
from tests.gateway.request_states import make_state

VOCABULARY = make_token_bytes()
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}'
CALLED = f"please say Well {CALL}</tool_call>{CALL}</tool_call> Done."
ONE_CALL = ToolUse(("weather",), is_single=True)


class Recorder:
    """A sink that checks the order of calls."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[str]] = {}
        self.calls: list[tuple[str, int, int, bool]] = []
        self.ends: dict[int, int] = {}
        self.over: list[int] = []
        self.terminal: list[StarlingError | None] = []
        self.flushes = 0
        self.starts = 0

    def started(self) -> None:
        assert not self.terminal
        self.starts += 1

    def text(self, sequence: SequenceState, new: str, begin: int, end: int) -> None:
        assert not self.terminal
        assert sequence.index not in self.over
        assert not sequence.request.waits_for_scores
        assert begin == self.ends.get(sequence.index, 0)
        assert end >= begin
        self.pieces.setdefault(sequence.index, []).append(new)
        self.ends[sequence.index] = end
        assert sequence.n_emitted == end
        self.calls.append((new, begin, end, sequence.is_flushed))

    def ended(self, sequence: SequenceState) -> None:
        assert sequence.index not in self.over
        self.over.append(sequence.index)

    def finished(self) -> None:
        self.terminal.append(None)

    def failed(self, error: StarlingError) -> None:
        self.terminal.append(error)

    def flush(self) -> None:
        self.flushes += 1


class World:
    """The relay and a scheduler, connected by queues from which a test can drop frames."""

    def __init__(self) -> None:
        self.now = 0.0
        self.generator = Generator()
        self.to_scheduler: list[m.Frame] = []
        self.scheduler_is_up = True
        self.ended: list[RequestState] = []
        self.relay = Relay(self._to_scheduler, lambda: self.now, self.ended.append)
        self.relay.vocabularies[MODEL] = VOCABULARY

    def _to_scheduler(self, frame: m.Frame) -> bool:
        if self.scheduler_is_up:
            self.to_scheduler.append(frame)
        return self.scheduler_is_up

    def request(
        self,
        name: str,
        n: int = 1,
        stop: tuple[str, ...] = (),
        max_tokens: int = 40,
        logprobs: int = -1,
        deadline: float = 1e9,
        scores: int | msgspec.UnsetType = msgspec.UNSET,
        tools: ToolUse | None = None,
    ) -> RequestState:
        ask = GenerationRequest(
            endpoint="generate",
            model=MODEL,
            n=n,
            stop=stop,
            logprobs=logprobs >= 0,
            prompt_logprobs=scores,
            tools=tools,
        )
        request = make_state(
            name,
            ask,
            until=deadline,
            prompt=array("i", list(name.encode())).tobytes(),
            max_tokens=max_tokens,
            sampling=m.Sampling(seed=7, logprobs=logprobs),
        )
        request.sink = Recorder()
        self.relay.open(request)
        return request

    # Events that the test applies one at a time.

    def scheduler_reads(self) -> None:
        while self.to_scheduler:
            self.generator.receive(self.to_scheduler.pop(0))

    def gateway_reads_scheduler(self) -> None:
        if self.generator.outbox:
            frame = self.generator.outbox.pop(0)
            if isinstance(frame, m.Tokens):
                self.relay.on_tokens(frame)
            else:
                assert isinstance(frame, m.Rejected)
                self.relay.on_rejected(frame)

    def scheduler_dies(self) -> None:
        self.scheduler_is_up = False
        self.generator = Generator()
        self.to_scheduler.clear()

    def scheduler_comes(self) -> None:
        if not self.scheduler_is_up:
            self.scheduler_is_up = True
            self.relay.on_scheduler_up()

    def frame_of_scheduler_is_lost(self) -> None:
        if self.generator.outbox and isinstance(self.generator.outbox[0], m.Tokens):
            lost = self.generator.outbox.pop(0)
            # Only the deadline reveals the loss of a last frame, so the finish is kept.
            kept = [s for s in lost.sequences if s.finish]
            if kept:
                self.generator.outbox.insert(0, m.Tokens(lost.model, lost.step, kept))

    def frame_comes_twice(self) -> None:
        if self.generator.outbox and isinstance(self.generator.outbox[0], m.Tokens):
            self.relay.on_tokens(self.generator.outbox[0])

    def steps_come_in_one_frame(self) -> None:
        """The scheduler merges two steps into one frame, which then names a sequence twice."""
        box = self.generator.outbox
        if len(box) > 1 and isinstance(box[0], m.Tokens) and isinstance(box[1], m.Tokens):
            first, second = box.pop(0), box.pop(0)
            box.insert(0, m.Tokens(first.model, second.step, [*first.sequences, *second.sequences]))

    def time_passes(self) -> None:
        self.now += 0.7
        self.relay.tick()

    def settle(self) -> None:
        self.scheduler_comes()
        for _ in range(3000):
            if not self.relay.requests:
                return
            self.generator.step(2)
            for _ in range(4):
                self.scheduler_reads()
                self.gateway_reads_scheduler()
            self.time_passes()
        raise AssertionError("requests that never end")


ACTIONS = [
    World.scheduler_reads,
    World.gateway_reads_scheduler,
    lambda world: world.generator.step(1),
    lambda world: world.generator.step(3),
    World.scheduler_dies,
    World.scheduler_comes,
    World.frame_of_scheduler_is_lost,
    World.frame_comes_twice,
    World.steps_come_in_one_frame,
    World.time_passes,
]


def expected(request: RequestState, sequence: SequenceState) -> tuple[str, str]:
    stop = request.spec.generation.stop[0] if request.spec.generation.stop else ""
    spec = sequence.spec
    tokens = output(request.spec.prompt_of(spec), 7, spec.choice, spec.max_tokens, (EOS,)) if spec.max_tokens else []
    stopped = tokens[-1:] == [EOS] or bool(stop and stop in text_of(tokens))
    if request.spec.generation.tools and CALL in text_of(tokens):
        return text_of(tokens).partition(CALL)[0] + CALL, "stop"
    return text_of(tokens, stop), "stop" if stopped else "length"


def check_finished(request: RequestState) -> None:
    sink = request.sink
    assert isinstance(sink, Recorder)
    assert request.outcome is Outcome.FINISHED, request.error
    assert sink.terminal == [None]
    assert sorted(sink.over) == list(range(len(request.sequences)))
    for sequence in request.sequences:
        text, finish = expected(request, sequence)
        assert "".join(sequence.text) == "".join(sink.pieces.get(sequence.index, [])) == text
        assert sequence.finish_reason == finish
        assert sequence.phase is SequencePhase.FINISHED


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(ACTIONS) - 1), max_size=150), st.integers(1, 60))
def test_recoveries_in_any_order_change_no_character(actions: list[int], max_tokens: int) -> None:
    world = World()
    requests = [
        world.request("plain", max_tokens=max_tokens),
        world.request("three", n=3, max_tokens=max_tokens),
        world.request("stopped", stop=("一只",), max_tokens=max_tokens),
        world.request("logprobs", logprobs=2, max_tokens=max_tokens),
        world.request("scored thrice", n=3, max_tokens=max_tokens, scores=1),
        world.request("only scored", max_tokens=0, scores=0),
        world.request("1", max_tokens=max_tokens, scores=2),
        world.request(CALLED, max_tokens=2 * max_tokens, tools=ONE_CALL),
    ]
    for action in actions:
        ACTIONS[action](world)
    world.settle()
    for request in requests:
        check_finished(request)
    assert sorted(r.id for r in world.ended) == sorted(r.id for r in requests)
    assert not world.relay.sequences
    logged = requests[3].sequences[0]
    assert len(logged.logprobs) == len(logged.tokens)
    for request in requests[4:7]:
        prompt, scores = request.spec.prompts[0], request.scores[0]
        words = [score_words(prompt, index, scores.top) for index in range(1, len(prompt) // 4)]
        assert bytes(scores.data) == b"".join(words)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(ACTIONS)), max_size=80), st.integers(0, 2))
def test_an_abandoned_or_late_request_ends_once_and_leaves_nothing(actions: list[int], how: int) -> None:
    world = World()
    request = world.request("first", n=2, deadline=5.0)
    other = world.request("second")
    for action in actions:
        if action < len(ACTIONS):
            ACTIONS[action](world)
        elif how == 0:
            world.relay.abandon(request)
        elif how == 1:
            world.relay.fail(request, StarlingError("INFERENCE", "poisoned"))
        else:
            world.now += 5.0
    world.settle()
    assert request.outcome is not Outcome.OPEN
    assert world.ended.count(request) == 1
    sink = request.sink
    assert isinstance(sink, Recorder)
    assert len(sink.terminal) == (0 if request.outcome is Outcome.ABANDONED else 1)
    check_finished(other)
    assert not world.relay.sequences
    world.scheduler_reads()
    world.generator.outbox.clear()
    assert not world.generator.running


def test_a_stop_string_cancels_past_its_last_token() -> None:
    world = World()
    request = world.request("stopped", stop=("ging",), max_tokens=200)
    world.settle()
    check_finished(request)
    world.scheduler_reads()
    sequence = request.sequences[0]
    (cancel,) = world.generator.cancelled
    assert cancel.at == sequence.n_used == request.completion_tokens
    whole = bytes(sequence.tokens[: sequence.n_used]).decode("utf-8", "replace")
    assert whole.endswith("ging")
    assert sequence.stop_string == "ging"


def test_the_only_call_cancels_past_its_last_token() -> None:
    world = World()
    request = world.request(CALLED, max_tokens=300, tools=ONE_CALL)
    world.settle()
    check_finished(request)
    world.scheduler_reads()
    sequence = request.sequences[0]
    (cancel,) = world.generator.cancelled
    assert cancel.at == sequence.n_used == request.completion_tokens == len(f"Well {CALL}")
    assert (sequence.finish_reason, sequence.stop_string) == ("stop", "")


def test_an_answer_that_may_have_several_calls_goes_on() -> None:
    world = World()
    request = world.request(CALLED, max_tokens=300, tools=ToolUse(("weather",)))
    world.settle()
    assert "".join(request.sequences[0].text).endswith("</tool_call> Done.")
    assert not world.generator.cancelled


def test_a_gap_causes_at_most_one_submission_a_second() -> None:
    world = World()
    world.request("gap")
    world.scheduler_reads()
    for _ in range(6):
        world.generator.step()
    del world.generator.outbox[0]
    while world.generator.outbox:
        world.gateway_reads_scheduler()
    assert world.relay.counts.gaps == 5
    assert [type(frame) for frame in world.to_scheduler] == [m.Cancel, m.Submit]
    world.scheduler_reads()
    assert world.generator.submitted[-1].forced == b""
    world.now += RESUBMIT_AFTER_S
    world.settle()
    check_finished(world.ended[0])


def test_a_resubmission_has_the_delivered_tokens_and_the_remaining_time() -> None:
    world = World()
    request = world.request("again", deadline=60.0)
    world.scheduler_reads()
    world.generator.step(5)
    world.gateway_reads_scheduler()
    world.now = 10.0
    world.scheduler_dies()
    world.scheduler_comes()
    (frame,) = world.to_scheduler
    assert isinstance(frame, m.Submit)
    assert array("i", frame.forced).tolist() == request.sequences[0].tokens
    assert len(frame.forced) == 5 * 4
    assert frame.deadline_ms == 50_000
    world.settle()
    check_finished(request)
    assert request.cached_tokens == 3


def test_a_finish_reason_lost_with_the_scheduler_follows_from_the_tokens() -> None:
    world = World()
    request = world.request("short", max_tokens=3)
    world.scheduler_reads()
    world.generator.step(3)
    (frame,) = world.generator.outbox
    (only,) = frame.sequences
    world.relay.on_tokens(m.Tokens(MODEL, 1, [m.SequenceTokens(only.sequence, 0, only.tokens)]))
    world.scheduler_dies()
    world.scheduler_comes()
    assert not world.to_scheduler
    world.settle()
    check_finished(request)


def test_a_rejected_new_request_fails_and_its_other_sequences_are_cancelled() -> None:
    world = World()
    world.generator.refuse = lambda frame: (
        m.Rejected(frame.sequence, "OVERLOADED", "full", "", 3.0) if frame.choice == 1 else None
    )
    request = world.request("three", n=3)
    assert [f.following for f in world.to_scheduler if isinstance(f, m.Submit)] == [2, 1, 0]
    world.scheduler_reads()
    world.gateway_reads_scheduler()
    assert request.error is not None
    assert (request.error.code, request.error.status) == ("OVERLOADED", 429)
    assert request.error.headers() == {"Retry-After": "3"}
    world.scheduler_reads()
    assert sorted(c.sequence for c in world.generator.cancelled) == ["three/0", "three/2"]
    assert request.sink.terminal == [request.error]


def test_a_running_request_that_is_rejected_after_a_restart_is_submitted_again() -> None:
    world = World()
    request = world.request("running", n=2)
    world.scheduler_reads()
    world.generator.step(2)
    world.gateway_reads_scheduler()
    world.scheduler_dies()
    world.generator.refuse = lambda frame: m.Rejected(frame.sequence, "OVERLOADED", "full", "", 2.0)
    world.scheduler_comes()
    assert [f.following for f in world.to_scheduler if isinstance(f, m.Submit)] == [0, 0]
    world.scheduler_reads()
    world.gateway_reads_scheduler()
    assert request.outcome is Outcome.OPEN
    world.generator.refuse = lambda frame: None
    world.now += 1.0
    world.relay.tick()
    assert not world.to_scheduler
    world.settle()
    check_finished(request)


def test_a_sequence_named_twice_in_a_frame_is_emitted_once() -> None:
    world = World()
    request = world.request("r")
    world.scheduler_reads()
    world.generator.step()
    world.generator.step()
    world.steps_come_in_one_frame()
    world.gateway_reads_scheduler()
    assert [(begin, end) for _, begin, end, _ in request.sink.calls] == [(0, 1), (1, 2)]
    assert request.sink.flushes == 1
    world.settle()
    check_finished(request)


def test_a_long_text_is_stored_in_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.gateway.requests.sequence_text.MAX_TEXT_PARTS", 4)
    world = World()
    request = world.request("long", max_tokens=100)
    world.settle()
    check_finished(request)
    assert len(request.sequences[0].text) < 4 < len(request.sequences[0].tokens)


def test_a_request_has_started_when_all_its_sequences_have_left_the_queue() -> None:
    world = World()
    request = world.request("two", n=2)
    first, second = request.sequences
    world.relay.on_tokens(m.Tokens(MODEL, 0, [], (first.id, "req-unknown/0")))
    assert (request.is_started, request.sink.starts) == (False, 0)
    world.relay.on_tokens(m.Tokens(MODEL, 0, [], (second.id,)))
    assert (request.is_started, request.sink.starts) == (True, 1)


def test_a_request_whose_vocabulary_is_not_loaded_fails() -> None:
    world = World()
    request = world.request("broken", n=2)
    del world.relay.vocabularies[MODEL]
    world.scheduler_reads()
    world.generator.step()
    world.gateway_reads_scheduler()
    assert request.outcome is Outcome.FAILED
    assert request.sink.terminal == [request.error]
    assert request.error.code == "INTERNAL"


def test_errors_and_timeouts_of_the_scheduler_are_terminal() -> None:
    for finish, code, status in (("error", "INFERENCE", 500), ("timeout", "TIMEOUT", 503)):
        world = World()
        request = world.request("bad")
        told = code if finish == "error" else ""
        bad = m.SequenceTokens("bad/0", 0, (), finish=finish, error=told, message="m")
        world.relay.on_tokens(m.Tokens(MODEL, 1, [bad, bad]))
        assert request.error is not None
        assert (request.error.code, request.error.status) == (code, status)
        assert len(request.sink.terminal) == 1


def test_the_scheduler_ends_a_late_request_before_the_gateway_does() -> None:
    """Both have the same deadline. If both ended it at once, the scheduler would count it as cancelled."""
    world = World()
    request = world.request("late", deadline=5.0)
    world.now = 5.0 + 0.5 * OVERTIME_S
    world.relay.tick()
    assert request.outcome is Outcome.OPEN
    over = m.SequenceTokens("late/0", 0, (), finish="timeout", error="TIMEOUT", message="m")
    world.relay.on_tokens(m.Tokens(MODEL, 1, [over]))
    assert request.error is not None
    assert request.error.code == "TIMEOUT"
    assert "request_timeout_ms" in request.error.message
    unheard = world.request("unheard", deadline=6.0)
    world.now = 6.0 + 1.1 * OVERTIME_S
    world.relay.tick()
    assert unheard.error is not None
    assert "request_timeout_ms" in unheard.error.message


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    stop=st.sampled_from([(), ("e",), ("ab", "the"), ("zzzz",), ("}}</tool_call>!", "!")]),
    logprobs=st.sampled_from([-1, 2]),
    name=st.sampled_from(["r", CALLED]),
    max_tokens=st.sampled_from([40, len(f"Well {CALL}"), 300]),
)
def test_events_do_not_depend_on_how_tokens_are_grouped(data, stop, logprobs, name, max_tokens):
    calls = []
    for is_grouped in (False, True):
        world = World()
        tools = ONE_CALL if name == CALLED else None
        request = world.request(name, stop=stop, logprobs=logprobs, tools=tools, max_tokens=max_tokens)
        world.scheduler_reads()
        while request.outcome is Outcome.OPEN:
            world.generator.step(data.draw(st.integers(1, 9)) if is_grouped else 1)
            world.gateway_reads_scheduler()
        assert request.outcome is Outcome.FINISHED
        assert isinstance(request.sink, Recorder)
        calls.append((request.sink.calls, request.completion_tokens, request.sequences[0].finish_reason))
    one_by_one, grouped = calls
    assert grouped == one_by_one
    assert all(end - begin <= 1 for _, begin, end, _ in grouped[0])
