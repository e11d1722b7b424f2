"""Reasoning ends at the same token whatever dies or is lost, and what was computed behind it is ignored."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.api.requests.reasoning_fields import Reasoning
from pipeline.protocol import messages as m
from stages.gateway.plugins.text_filter import TextFilter
from stages.gateway.reasoning.reasoning_parser import ReasoningParser
from stages.gateway.requests.reasoning_budget import MAX_WAIT
from stages.gateway.requests.relay import Relay
from stages.gateway.requests.state import Outcome, RequestState
from stages.gateway.requests.text_decoder import StreamDecoder
from tests.gateway.peers import EOS, MODEL, OTHERWISE, SAY, Generator, make_token_bytes, replaced
from tests.gateway.request_states import make_state

VOCABULARY = make_token_bytes()
MARK = b"</think>"
REASONING = Reasoning("<think>", "</think>", is_open=True, budget=12, end_ids=tuple(MARK))
THOUGHT = b"Let me think about that. </think>Yes."


class _Sink:
    def __init__(self) -> None:
        self.text_so_far = ""

    def started(self) -> None:
        pass

    def text(self, sequence: object, new: str, begin: int, end: int) -> None:
        self.text_so_far += new

    def ended(self, sequence: object) -> None:
        pass

    finished = flush = started

    def failed(self, error: Exception) -> None:
        raise error


def request(
    prompt: bytes = SAY + THOUGHT, max_tokens: int = 80, logprobs: int = -1, plugins: tuple[str, ...] = ()
) -> RequestState:
    state = make_state(
        "req-1",
        GenerationRequest(endpoint="chat", model=MODEL, reasoning=REASONING, logprobs=logprobs >= 0),
        prompt=array("i", list(prompt)).tobytes(),
        max_tokens=max_tokens,
        sampling=m.Sampling(seed=7, logprobs=logprobs),
        plugins=plugins,
    )
    state.sink = _Sink()  # type: ignore[assignment]
    return state


class _World:
    def __init__(self) -> None:
        self.now = 0.0
        self.generator = Generator()
        self.is_up = True
        self.relay = Relay(
            self._send, lambda: self.now, open_filter=lambda sequence: TextFilter(sequence, [], self.relay)
        )
        self.relay.vocabularies[MODEL] = VOCABULARY

    def _send(self, frame: m.Frame) -> bool:
        if self.is_up:
            self.generator.receive(frame)
        return self.is_up

    def read(self, state: RequestState, *, drop: bool = False) -> None:
        frames, self.generator.outbox = self.generator.outbox, []
        for frame in frames:
            if not drop and state.outcome is Outcome.OPEN:
                assert isinstance(frame, m.Tokens)
                self.relay.on_tokens(frame)

    def restart_scheduler(self) -> None:
        self.generator = Generator()
        self.is_up = True
        self.relay.on_scheduler_up()

    def finish(self, state: RequestState) -> None:
        for _ in range(300):
            if state.outcome is not Outcome.OPEN:
                return
            self.now += 1.0
            self.relay.tick()
            self.generator.step(3)
            self.read(state)
        raise AssertionError("the request does not end")


EXPECTED = [*THOUGHT[:12], *MARK, *OTHERWISE, EOS]


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.sampled_from(["step", "step", "many", "read", "drop", "down", "up", "tick"]), max_size=40),
    logprobs=st.sampled_from([-1, 0, 2]),
    plugins=st.sampled_from([(), ("one",)]),
)
def test_no_death_or_loss_changes_where_it_ends(actions: list[str], logprobs: int, plugins: tuple[str, ...]) -> None:
    """Nor does the way of the text through plugins."""
    world, state = _World(), request(logprobs=logprobs, plugins=plugins)
    world.relay.open(state)
    for action in actions:
        if action in ("step", "many"):
            world.generator.step(1 if action == "step" else 30)
        elif action in ("read", "drop"):
            world.read(state, drop=action == "drop")
        elif action == "down":
            world.is_up = False
        elif action == "up":
            world.restart_scheduler()
        else:
            world.now += 0.1
            world.relay.tick()
    world.restart_scheduler()  # as after frames that were lost without others behind them
    world.finish(state)
    (sequence,) = state.sequences
    assert sequence.tokens[: sequence.n_used] == EXPECTED
    assert "".join(sequence.text) == bytes(EXPECTED[:-1]).decode()
    assert sequence.n_reasoning == 12 + len(MARK)
    if logprobs >= 0:
        assert [one.logprob for one in sequence.logprobs] == [-0.5] * 12 + [0.0] * 8 + [-0.5] * (len(EXPECTED) - 20)


@pytest.mark.parametrize("known", range(5, len(EXPECTED)))
def test_the_tokens_of_another_server_are_continued(known: int) -> None:
    """They end before the budget, in the forced mark, or behind it."""
    world, state = _World(), request()
    state.sequences[0].tokens = EXPECTED[:known]
    world.relay.open(state)
    world.finish(state)
    assert state.sequences[0].tokens == EXPECTED


@pytest.mark.parametrize(
    ("thought", "at"), [(b"Let me th</think>", 17), (b"Let me thin\xc3\xa4k", 13), (b"<" * 60, 28)]
)
def test_a_character_or_a_mark_is_awaited_for_some_tokens(thought: bytes, at: int) -> None:
    world, state = _World(), request(SAY + thought)
    world.relay.open(state)
    world.finish(state)
    tokens = state.sequences[0].tokens
    if thought.endswith(MARK):
        assert tokens == [*thought, EOS]
    else:
        assert tokens == replaced([*thought[:at], *MARK])
    assert MAX_WAIT == 16


def test_nothing_is_forced_at_the_last_token() -> None:
    world, state = _World(), request(max_tokens=12)
    world.relay.open(state)
    world.finish(state)
    assert (state.sequences[0].tokens, state.sequences[0].finish_reason) == ([*THOUGHT[:12]], "length")


def test_a_mark_that_the_model_writes_at_the_budget_counts_as_forced() -> None:
    """Log probabilities must not depend on how many tokens had come."""
    found = set()
    for n in (1, 40):
        world, state = _World(), request(SAY + b"Let me think" + MARK + OTHERWISE.replace(b"\n", b"\\n"), logprobs=0)
        world.relay.open(state)
        while state.outcome is Outcome.OPEN:
            world.generator.step(n)
            world.read(state)
        sequence = state.sequences[0]
        assert sequence.tokens == EXPECTED
        found.add(msgspec.json.encode(sequence.logprobs))
    assert len(found) == 1


def test_what_the_parser_says_of_its_state() -> None:
    parser = ReasoningParser(REASONING)
    states = []
    for part in ("  ", "a", " <", "/thin", "x", "</think>", "b"):
        parser.feed(part)
        states.append((parser.is_reasoning, parser.may_be_ending))
    within, ending, answer = (True, False), (True, True), (False, False)
    assert states == [within, within, ending, ending, within, answer, answer]
    assert not StreamDecoder().is_reasoning(is_whole=False)
