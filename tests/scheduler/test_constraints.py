"""Sequences with constraints in the engine: the same tokens whatever is late, lost or drafted."""

from __future__ import annotations

import random
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.protocol.messages import Constraint, Frame
from shm import step_ring as sh
from shm.step_ring import StepsGeometry
from stages.scheduler.constraints import constraints as constraints_module
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import grammar, mask_writer
from stages.scheduler.constraints.mask_writer import MaskWriter
from stages.scheduler.constraints.vetting import Vetting
from stages.scheduler.core import ring as ring_module
from stages.scheduler.recovery import quarantine

from .peers import VOCAB, submission
from .world import World

STOP = VOCAB - 1
PIECES = [*(chr(32 + i).encode() for i in range(95)), *(b"ab", b"abc", b"xa") * 10, b"", b"bx", b"<end>"]
assert len(PIECES) == VOCAB
PATTERN = "([a-c]{1,3}x?){3,40}y"


def vocabulary() -> f.VocabularyFile:
    ends = array("I", accumulate(map(len, PIECES)))
    control = array("i", [STOP, STOP - 2])
    return f.VocabularyFile(b"".join(PIECES), ends.tobytes(), control.tobytes(), (STOP,))


@cache
def tokenizer() -> Any:
    return grammar.make_tokenizer(vocabulary(), 32 * sh.mask_words(VOCAB))


def at_once(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    return future


@pytest.fixture(scope="module")
def many_deaths() -> Iterator[None]:
    """The mask process and the worker may die at the same token as often as a test wants."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraints_module, "MAX_DEATHS", 1000)
        patch.setattr(quarantine, "CULPRIT_AT", 1000)
        yield


class ConstrainedWorld(World):
    """A world with a mask process, whose frames are delivered when the test requests it."""

    def __init__(self, **settings: Any) -> None:
        self.vetting = Vetting(limit_s=10.0)
        self.to_masks: deque[tuple[bool, Frame]] = deque()  # with whether it goes to the process for slow masks
        self.from_masks: deque[Frame] = deque()
        super().__init__(vetting=self.vetting, mask_words=sh.mask_words(VOCAB), **settings)
        self.constraints = self.engine.constraints
        self.constraints.set_vocabulary("vocabulary")
        self.constraints.set_rows("rows")
        self.start_masks()

    def start_masks(self) -> None:
        """New mask processes: they have lost everything, and all frames to and from the old ones."""
        self.writers = [MaskWriter(at_once, 4, 4, threads=2), MaskWriter(at_once, 4, 4, is_slow=True)]
        for writer in self.writers:
            writer.set_vocabulary("m", vocabulary())
            writer.set_rows("m", self.steps)
            writer._tokenizers["m"] = tokenizer()
        self.to_masks.clear()
        self.from_masks.clear()
        for is_slow in (False, True):
            self.constraints.replay(self.now, is_slow)
        self.constraints.flush(self.now)

    def exchange_with_masks(self, most: int = 1 << 30) -> None:
        """Deliver at most `most` frames to the mask processes, and their answers."""
        for is_slow in (False, True):
            frames = self.constraints.frames_for(is_slow)
            self.to_masks.extend((is_slow, frame) for frame in frames)
            frames.clear()
        while self.to_masks and most > 0:
            is_slow, frame = self.to_masks.popleft()
            if not isinstance(frame, f.Vocabulary | f.Rows):
                self.writers[is_slow].handle(frame)  # type: ignore[arg-type]
            most -= 1
        for writer in self.writers:
            writer.write()
            self.from_masks.extend(writer.answers)
            writer.answers.clear()
        while self.from_masks:
            answer = self.from_masks.popleft()
            if isinstance(answer, f.Kept):
                self.constraints.on_kept(answer)
            elif isinstance(answer, f.Failed):
                self.constraints.on_failed(answer)
            elif isinstance(answer, f.Slow):
                self.constraints.on_slow(answer)

    def vet(self, error: str = "") -> None:
        """Answer all trials."""
        while self.vetting.frames:
            [frame] = self.vetting.frames
            self.vetting.frames.clear()
            assert isinstance(frame, f.Vet)
            self.vetting.on_vetted(f.Vetted(frame.id, error), self.now)

    def run_until_idle(self, rounds: int = 20_000) -> None:
        """As in `World`, with masks in time."""
        for _ in range(rounds):
            self.vet()
            self.run_round()
            self.exchange_with_kv()
            self.exchange_with_masks()
            self.compute_step()
            self.run_round()
            self.collect()
            if not self.engine.is_busy:
                break
            self.now += 0.001
            if not self.engine.steps.unacknowledged:
                self.advance(0.01)
        else:
            raise AssertionError(f"never done: {self.engine.table.scheduled}")
        self.exchange_with_kv()


def constrained(name: str, seed: int, pattern: str = PATTERN, **fields: Any) -> Any:
    constraint = Constraint("regex", pattern, "regex")
    prompt = [int(name, 36) % 90, 66, 65, 67, 66, 65]
    return submission(name, prompt, 60, seed=seed, constraint=constraint, stop_ids=(STOP,), **fields)


def text_of(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens if token != STOP).decode()


def alone(frame: Any) -> tuple[list[int], str]:
    """The tokens and the end of an undisturbed run."""
    world = ConstrainedWorld(speculate=-1)
    world.submit(frame)
    world.run_until_idle()
    return world.tokens[frame.sequence], world.ends[frame.sequence]


def test_output_matches_the_constraint_and_ends_with_it() -> None:
    for seed in range(10):
        tokens, end = alone(constrained("a", seed))
        if end == "stop":
            assert tokens[-1] == STOP
            assert re.fullmatch(PATTERN, text_of(tokens))
        else:
            assert end == "length"
    assert alone(constrained("a", 1, "ab|abc"))[1] == "stop"


@pytest.mark.usefixtures("many_deaths")
@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([-1, 3, 16]), st.sampled_from([1, 3]), st.booleans())
def test_tokens_do_not_depend_on_late_or_slow_masks_lost_processes_or_drafts(
    seed: int, speculate: int, ahead: int, is_slow: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_writer, "SLOW_S", 0.0 if is_slow else float("inf"))
        check_disturbed(random.Random(seed), speculate, ahead)


def check_disturbed(rng: random.Random, speculate: int, ahead: int) -> None:
    """Whatever happens, every sequence has the tokens of an undisturbed run."""
    world = ConstrainedWorld(batch=3, pages=24, context=96, period=2 if speculate > 0 else 0, speculate=speculate)
    frames = [constrained(name, i, [PATTERN, "[a-c]{9}", "(ab)+y|c{30}"][i % 3]) for i, name in enumerate("abcde")]
    plain = [submission("x", [1, 2, 3], 30, seed=7), submission("y", [4, 5], 30, seed=8)]
    for frame in [*frames, *plain]:
        world.submit(frame)
    world.vet()
    for _ in range(400):
        event = rng.randrange(40)
        if event == 0:
            world.kill_worker(half_way=rng.random() < 0.5)
        elif event == 1 and rng.random() < 0.3:
            world.start_masks()
        elif event == 2:
            world.restart_kv()
        elif event < 16:
            world.exchange_with_masks(rng.randrange(1, 4))
        elif event < 26:
            world.compute_step()
        else:
            world.now += 0.001 * rng.randrange(ahead * 20)
            world.run_round()
            world.exchange_with_kv()
        world.collect()
    world.run_until_idle()
    period = world.period
    for frame in frames:
        undisturbed = ConstrainedWorld(period=period, speculate=-1)
        undisturbed.submit(frame)
        undisturbed.run_until_idle()
        name = frame.sequence
        assert (world.tokens[name], world.ends[name]) == (undisturbed.tokens[name], undisturbed.ends[name])
    assert not world.constraints.is_used


def test_draft_tokens_that_break_the_constraint_are_not_verified() -> None:
    """The text repeats itself, so drafts come; the constraint ends the repetition."""
    world = ConstrainedWorld(period=2, speculate=8)
    frame = submission(
        "a", [65, 66] * 8, 40, constraint=Constraint("regex", "(ab|a|b){2,10}c{20}", "regex"), stop_ids=(STOP,)
    )
    published: list[tuple[int, ...]] = []
    publish = ring_module.Ring.publish

    def record(self: Any, entries: Any, *more: Any) -> int:
        published.extend(entry[:4] for entry in entries)
        return publish(self, entries, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_module.Ring, "publish", record)
        world.submit(frame)
        world.run_until_idle()
    assert any(samples > 1 for *_, samples in published), "nothing was drafted"
    assert world.engine.stats.drafted >= world.engine.stats.accepted > 0
    undisturbed = ConstrainedWorld(period=2, speculate=-1)
    undisturbed.submit(frame)
    undisturbed.run_until_idle()
    assert world.tokens["a"] == undisturbed.tokens["a"]


def test_a_late_mask_delays_its_own_sequence_only() -> None:
    world = ConstrainedWorld(speculate=-1)
    world.submit(constrained("a", 1))
    world.submit(submission("x", [1, 2, 3], 20, seed=7))
    world.vet()
    for _ in range(60):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
        world.collect()
        world.now += 0.01
    assert world.ends == {"x": "length"}
    assert 0 < world.worker.voids <= 2
    world.run_until_idle()
    assert world.tokens["a"] == alone(constrained("a", 1))[0]


def test_no_step_waits_for_a_slow_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence is computed only when its mask is there; others, and those of the quick process, go on."""
    monkeypatch.setattr(mask_writer, "SLOW_S", 0.0)
    world = ConstrainedWorld(speculate=-1)
    voids: list[str] = []
    mark_void = world.constraints.mark_void
    monkeypatch.setattr(world.constraints, "mark_void", lambda one: (voids.append(one.id), mark_void(one)))
    slow = constrained("a", 1, "[a-z]{50}")
    world.submit(slow)
    world.vet()
    while not world.engine.table.live["a"].waits_for_mask:
        world.run_round()
        world.exchange_with_kv()
        world.exchange_with_masks()
        world.compute_step()
        world.collect()
    monkeypatch.setattr(mask_writer, "SLOW_S", float("inf"))
    for frame in (submission("x", [1, 2, 3], 20, seed=7), constrained("b", 2, "[a-c]{9}"), constrained("c", 3)):
        world.submit(frame)
        world.vet()
        held: list[Frame] = []
        before = len(world.tokens["a"])
        for _ in range(100):
            world.run_round()
            world.exchange_with_kv()
            held += world.constraints.slow_frames
            world.constraints.slow_frames.clear()
            world.exchange_with_masks()
            world.compute_step()
            world.collect()
            world.now += 0.001
        assert frame.sequence in world.ends
        assert len(world.tokens["a"]) <= before + 1
        world.to_masks.extend((True, one) for one in held)
        world.exchange_with_masks()
    assert voids == ["a"]  # of the step that was published before it became slow
    world.run_until_idle()
    assert world.tokens["a"] == alone(slow)[0]


def test_a_slow_constraint_is_slow_from_its_first_token_the_next_time() -> None:
    world = ConstrainedWorld(speculate=-1)
    first = constrained("a", 1)
    world.submit(first)
    world.vet()
    world.vetting.mark_slow("m", first.constraint)
    world.run_until_idle()
    world.submit(constrained("b", 2))
    assert world.engine.table.live["b"].waits_for_mask
    world.run_until_idle()
    assert world.tokens["b"] == alone(constrained("b", 2))[0]


@pytest.mark.parametrize(
    ("most_of_sequence", "words"), [(1500, "its masks take more than"), (1 << 40, "of all requests")]
)
def test_memory_of_masks_is_bounded_for_one_request_and_in_all(most_of_sequence: int, words: str) -> None:
    """The request whose masks took the most memory fails; another one, and its masks, stay."""
    used = {"a": 0, "b": 0}
    geometry = StepsGeometry(2, 2, 2, 32, 2, mask_words=sh.mask_words(VOCAB))
    steps = sh.blank_steps(geometry)
    trims: list[int] = []

    def trim() -> None:
        trims.append(sum(used.values()))
        for name in used.keys() - writer._sequences.keys():
            used[name] = 0

    memory = mask_writer.Memory(lambda: sum(used.values()), 4000, most_of_sequence, trim)
    writer = MaskWriter(at_once, 4, 4, is_slow=True, memory=memory)
    writer.set_vocabulary("m", vocabulary())
    writer.set_rows("m", steps)
    compute = mask_writer.write_mask

    def grow(matcher: Any, steps: Any, row: int, known: int, epoch: int) -> None:
        compute(matcher, steps, row, known, epoch)
        used["ab"[row]] += (100, 1000)[row]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_writer, "write_mask", grow)
        for name in "ab":
            writer.handle(f.Open(name, "m", "tenant", Constraint("regex", "[a-c]{40}", "regex")))
        failed = []
        steps.tokens[:] = 65  # a
        for length in range(1, 12):
            for row, name in enumerate("ab"):
                writer.handle(f.Mask(name, row, 1, length, 1))
            writer.write()
            failed += [answer for answer in writer.answers if isinstance(answer, f.Failed)]
            writer.answers.clear()
    [failure] = failed
    assert failure.sequence == "b"
    assert words in failure.reason
    assert bool(trims) == (words == "of all requests")
    assert steps.mask_ready[0, 11 % sh.MASK_SLOTS] == sh.mask_tag(1, 11)


def test_a_continued_sequence_gets_the_rest_of_its_tokens() -> None:
    frame = constrained("a", 3)
    tokens, end = alone(frame)
    world = ConstrainedWorld(speculate=-1)
    world.submit(constrained("a", 3, forced=tokens[:4]))
    world.run_until_idle()
    assert (world.tokens["a"], world.ends["a"]) == (tokens[4:], end)


def test_a_refused_constraint_ends_the_submission_and_names_the_field() -> None:
    world = ConstrainedWorld()
    world.submit(constrained("a", 1))
    assert not world.ends
    world.vet("it is no good")
    [(_, rejected)] = world.engine.outbox.rejected
    assert (rejected.code, rejected.param) == ("INVALID_REQUEST", "regex")
    assert rejected.message == "regex cannot be used: it is no good"


def test_a_cancelled_submission_is_not_queued_after_its_trial() -> None:
    world = ConstrainedWorld()
    world.submit(constrained("a", 1))
    world.cancel("a")
    world.vet()
    assert not world.engine.table.live
    assert not world.engine.is_busy


def test_an_automaton_that_fails_ends_its_sequence_alone() -> None:
    world = ConstrainedWorld(speculate=-1)
    world.submit(constrained("a", 1))
    world.submit(constrained("b", 2))
    world.vet()
    world.run_round()
    world.constraints.on_failed(f.Failed("a", "too complex"))
    world.run_until_idle()
    assert world.errors["a"] == "INFERENCE"
    assert world.tokens["b"] == alone(constrained("b", 2))[0]


def test_a_sequence_at_whose_masks_the_process_dies_each_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ConstrainedWorld(speculate=-1)
    world.submit(constrained("a", 1))
    world.vet()
    monkeypatch.setattr(constraints_module, "MAX_DEATHS", 3)
    for _ in range(5):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
        world.start_masks()
        world.collect()
    assert world.errors["a"] == "INFERENCE"


def test_an_engine_without_helpers_refuses_constraints() -> None:
    world = World()
    world.submit(constrained("a", 1))
    world.collect()
    assert world.errors["a"] == "INVALID_REQUEST"


def test_geometry_without_masks_needs_no_room_for_them() -> None:
    g = StepsGeometry(2, 2, 2, 32, 2)
    assert sh.blank_steps(g).masks.size == 0
