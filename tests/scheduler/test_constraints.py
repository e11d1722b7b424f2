"""Sequences with constraints in the engine: the same tokens whatever is late, lost or drafted."""

from __future__ import annotations

import logging
import random
import re
from array import array
from collections import deque
from collections.abc import Iterator
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
from stages.scheduler.constraints import vetting as vetting_module
from stages.scheduler.constraints.mask_writer import MaskWriter
from stages.scheduler.constraints.vetting import Vetting
from stages.scheduler.core import ring as ring_module
from stages.scheduler.recovery import quarantine

from .masks import at_once
from .peers import VOCAB, submission
from .world import GATEWAY, World

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
        self.to_masks: deque[Frame] = deque()
        self.from_masks: deque[Frame] = deque()
        super().__init__(vetting=self.vetting, mask_words=sh.mask_words(VOCAB), **settings)
        self.constraints = self.engine.constraints
        self.constraints.set_vocabulary("vocabulary")
        self.constraints.set_rows("rows")
        self.start_masks()

    def start_masks(self) -> None:
        """A new mask process: it has lost everything, and all frames to and from the old one."""
        self.writer = MaskWriter(at_once, 4, 4)
        self.writer.set_vocabulary("m", vocabulary(), tokenizer())
        self.writer.set_rows("m", self.steps)
        self.to_masks.clear()
        self.from_masks.clear()
        constraints_module.charge_death([self.constraints], "")
        self.constraints.replay(self.now)
        self.constraints.flush(self.now)

    def exchange_with_masks(self, most: int = 1 << 30) -> None:
        """Deliver at most `most` frames to the mask process, and its answers."""
        self.to_masks.extend(self.constraints.frames)
        self.constraints.frames.clear()
        while self.to_masks and most > 0:
            frame = self.to_masks.popleft()
            if not isinstance(frame, f.Vocabulary | f.Rows):
                self.writer.handle(frame)  # type: ignore[arg-type]
            most -= 1
        self.from_masks.extend(self.writer.answers)
        self.writer.answers.clear()
        while self.from_masks:
            answer = self.from_masks.popleft()
            if isinstance(answer, f.Kept):
                self.constraints.on_kept(answer)
            elif isinstance(answer, f.Failed):
                self.constraints.on_failed(answer)

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
@given(st.integers(0, 2**32), st.sampled_from([-1, 3, 16]), st.sampled_from([1, 3]))
def test_tokens_do_not_depend_on_late_masks_lost_processes_or_drafts(seed: int, speculate: int, ahead: int) -> None:
    rng = random.Random(seed)
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


@pytest.mark.parametrize("arrival", range(2, 12))
def test_a_step_behind_skipped_draft_tokens_takes_no_mask_of_theirs(arrival: int) -> None:
    """A prompt arrives while draft tokens are vetted, so they are not verified; then all masks are late."""
    letters = b"abcd"
    frame = constrained("a", 1, "(a[0-4]|b[5-9]|c[x-z]|d[A-F]){3,40}y")
    expected, end = alone(frame)
    ids = [PIECES.index(bytes([letter])) for letter in letters]

    def may_draft(at: int) -> bool:
        return at < len(expected) and expected[at] in ids

    world = ConstrainedWorld(speculate=8, max_step_tokens=64)
    proposer = world.engine.proposer
    with pytest.MonkeyPatch.context() as patch:
        # A letter that the constraint allows, and that is not the sampled one: other characters follow it.
        patch.setattr(
            proposer,
            "_propose",
            lambda s, room: tuple(i for i in ids if may_draft(s.outputs) and i != expected[s.outputs])[:1],
        )
        patch.setattr(proposer, "expects_match", lambda s: may_draft(s.outputs + s.run.ahead))
        world.submit(frame)
        for i in range(100):
            world.vet()
            if i == arrival:
                world.submit(submission("x", [1, 2, 3, 4, 5] * 40, 5, seed=9))
            world.run_round()
            world.exchange_with_kv()
            world.exchange_with_masks()
            world.compute_step()
            if i >= arrival:
                world.compute_step()
            world.collect()
            world.now += 0.001
        world.run_until_idle()
    assert (world.tokens["a"], world.ends["a"]) == (expected, end)


def test_a_failure_after_masks_of_draft_tokens_does_not_hide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the scheduler would use their epoch for tokens that are not the drafts."""
    write, calls = mask_writer.write_mask, 0

    def fail_at_third(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # after the known tokens, and after the first draft token
            raise MemoryError
        write(*args)

    monkeypatch.setattr(mask_writer, "write_mask", fail_at_third)
    world = ConstrainedWorld()
    world.writer.handle(f.Open("a", "m", "", Constraint("regex", "[a-c]{9}", "regex")))
    drafts = tuple(PIECES.index(piece) for piece in (b"a", b"b", b"c"))
    world.writer.handle(f.Mask("a", 0, 4, 4, 7, drafts))
    tags = [int(world.steps.mask_ready[0, known % sh.MASK_SLOTS]) for known in (4, 5, 6)]
    assert tags == [sh.mask_tag(7, 4), sh.mask_tag(7, 5), 0]
    assert world.writer.answers == [f.Kept("a", 7, 1)]


def test_epochs_stay_within_an_entry_of_a_step() -> None:
    world = ConstrainedWorld(speculate=-1)
    world.constraints._epochs = constraints_module.MAX_EPOCH - 1
    frames = [constrained(name, seed) for seed, name in enumerate("abc")]
    for frame in frames:
        world.submit(frame)
    world.run_until_idle()
    for frame in frames:
        assert (world.tokens[frame.sequence], world.ends[frame.sequence]) == alone(frame)


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


def test_cancelled_submissions_leave_nothing_to_compile() -> None:
    """Nor do those of a gateway that has left, or that are submitted again with another constraint."""
    world = ConstrainedWorld()
    world.submit(constrained("first", 1, "first"))  # its compilation begins
    for i in range(300):
        world.submit(constrained("a", 1, f"a{i}"))
    world.submit(constrained("b", 1, "b"))
    world.cancel("a")
    assert len(world.vetting._jobs) == 2
    world.constraints.drop_gateway(GATEWAY)
    assert not world.constraints.is_busy
    world.vet()
    assert not world.vetting.is_busy
    assert not world.vetting.has_passed("m", Constraint("regex", "b", "regex"))


def test_a_submission_whose_constraint_is_displaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting_module, "MAX_JOBS", 3)
    world = ConstrainedWorld()
    for i in range(3):
        world.submit(constrained(f"a{i}", 1, f"a{i}", tenant="a"))
    world.submit(constrained("b", 1, "b", tenant="b"))
    refused = [(frame.sequence, frame.code) for _, frame in world.engine.outbox.rejected]
    assert refused == [("a2", "OVERLOADED")]
    world.vet()
    assert set(world.engine.table.live) == {"a0", "a1", "b"}


def test_a_tenant_whose_submissions_wait_locks_no_other_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one constraint, which is a single trial: the newest submission of the tenant with most of them goes."""
    monkeypatch.setattr(constraints_module, "MAX_HELD", 3)
    world = ConstrainedWorld()
    for name in ("a1", "a2", "a3"):
        world.submit(constrained(name, 1, tenant="a"))
    world.submit(constrained("a4", 1, tenant="a"))
    world.submit(constrained("b1", 1, tenant="b"))
    world.submit(constrained("b2", 1, tenant="b"))
    refused = [(frame.sequence, frame.code) for _, frame in world.engine.outbox.rejected]
    assert refused == [("a4", "OVERLOADED"), ("a3", "OVERLOADED"), ("b2", "OVERLOADED")]
    world.vet()
    assert set(world.engine.table.live) == {"a1", "a2", "b1"}


def test_a_mask_is_asked_for_with_the_rows_serial_number() -> None:
    world = ConstrainedWorld()
    world.submit(constrained("s", 1))
    world.vet()
    world.run_round()
    asked = [frame for frame in world.constraints.frames if isinstance(frame, f.Mask)]
    row = world.engine.table.live["s"].run.row
    assert [frame.serial for frame in asked] == [int(world.steps.row_ints[row, sh.SERIAL])]
    assert asked[0].serial > 0


def test_an_automaton_that_fails_ends_its_sequence_alone() -> None:
    world = ConstrainedWorld(speculate=-1)
    world.submit(constrained("a", 1))
    world.submit(constrained("b", 2))
    world.vet()
    world.run_round()
    world.constraints.on_failed(f.Failed("a", "too complex", "INVALID_REQUEST"))
    world.run_until_idle()
    assert world.errors["a"] == "INVALID_REQUEST"
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


def test_the_log_quotes_no_constraint_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "starling.scheduler")
    world = ConstrainedWorld()
    world.submit(constrained("a", 1))
    world.vet("unexpected 'my secret' in the pattern")
    world.submit(constrained("b", 2, "(ab)+"))
    world.vet()
    world.constraints.on_failed(f.Failed("b", "too many states for 'my secret'", "INVALID_REQUEST"))
    lines = {record.getMessage(): vars(record) for record in caplog.records}
    for event in ("a sequence is refused", "a sequence has failed"):
        assert (lines[event]["code"], lines[event]["param"]) == ("INVALID_REQUEST", "regex")
    assert "secret" not in str(lines)
