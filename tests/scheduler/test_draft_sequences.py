"""A draft model and its target: two engines, two kvs and two workers, each of which may fail.

Whatever happens to the draft model, the target's tokens are those of an undisturbed run, and no page, row or draft
sequence is left behind.
"""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.api.adapter_salt import with_adapter
from stages.scheduler.core.sequence import Phase
from stages.scheduler.draft.draft_pool import IDLE_S
from stages.scheduler.draft.proposer import INITIAL_CREDIT, DraftLink
from stages.scheduler.recovery.quarantine import CULPRIT_AT
from tests.properties import examples

from .peers import reference, submission
from .world import World


class Pair:
    """`target` gets draft tokens from `draft`; one in `differs` of its samples is wrong (0: none)."""

    def __init__(
        self,
        *,
        differs: int = 0,
        pages: int = 64,
        draft_pages: int = 64,
        batch: int = 4,
        shares_cores: bool = True,
        speculate: int = 8,
        draft_context: int = 400,
        **options,
    ) -> None:
        self.target = World(batch=batch, pages=pages, speculate=speculate, **options)
        self.draft = World(batch=batch, pages=draft_pages, max_draft_sequences=4, context=draft_context)
        self.draft.worker.differs = differs
        self.draft.engine.cost.fixed_us = 10.0
        self.link = DraftLink(self.draft.engine.drafts, shares_cores)
        self.target.engine.proposer.set_link(self.link)

    @property
    def worlds(self) -> tuple[World, World]:
        return self.target, self.draft

    @property
    def drafts(self):
        return self.draft.engine.drafts.sequences

    def advance(self, seconds: float) -> None:
        for world in self.worlds:
            world.advance(seconds)

    def run_round(self) -> None:
        for world in (*self.worlds, self.draft):
            world.run_round()

    def round(self, seconds: float = 1e-6) -> bool:
        """One round of both engines, kvs and workers; a step of either takes `seconds`. False: no step was computed."""
        has_worked = False
        self.run_round()
        for world in self.worlds:
            world.exchange_with_kv()
            world.run_round()
            if world.compute_step():
                has_worked = True
                for other in self.worlds:
                    other.now += seconds
            world.run_round()
            world.collect()
        return has_worked

    def run_until_idle(self, rounds: int = 30_000) -> None:
        for _ in range(rounds):
            has_worked = self.round()
            if not any(world.engine.is_busy for world in self.worlds):
                break
            if not has_worked:
                self.advance(0.1)
        else:
            raise AssertionError(f"never done: {self.target.engine.table.scheduled} {self.drafts}")
        self.check_gone()

    def check_gone(self) -> None:
        """No draft sequence, row or page is left."""
        self.run_round()
        while self.draft.compute_step():
            self.run_round()
        for world in self.worlds:
            world.run_round()
            world.exchange_with_kv()
            assert not world.engine.table.scheduled
            assert not world.engine.drafts.sequences
            assert not world.kv.leases, "pages leaked"
            assert not world.engine.leases.unanswered
            world.check_bounds()
            if not world.worker.differs:
                world.check_all()
        assert self.draft.submitted.keys() == self.draft.ends.keys()


def free_text(name: str = "a", n: int = 150, **fields):
    return submission(name, [1, 2, 3], n, **fields)


def test_a_draft_model_that_agrees_saves_steps_and_changes_no_token():
    pair = Pair()
    pair.target.submit(frame := free_text())
    pair.run_until_idle()
    assert (pair.target.tokens["a"], "length") == reference(frame)
    stats = pair.target.engine.stats
    assert stats.steps < 60, "of 150 tokens"
    assert stats.model_accepted > 100
    assert stats.model_drafted - stats.model_accepted < 10
    assert stats.drafted == stats.model_drafted + (stats.drafted - stats.model_drafted)


def test_draft_sequences_are_not_counted_as_requests():
    pair = Pair()
    pair.target.submit(free_text())
    pair.run_until_idle()
    engine = pair.draft.engine
    assert engine.stats.steps > 50, "it has computed draft tokens"
    counted = (engine.stats.submitted, engine.stats.generated, engine.stats.prompt_computed, engine.stats.prompt_cached)
    assert counted == (0, 0, 0, 0)
    assert not engine.stats.finished
    assert not engine.queues.tenants
    assert pair.draft.tokens == {}
    tenant = pair.target.engine.queues.tenants["t"]
    plain = World()
    plain.submit(free_text())
    plain.run_until_idle()
    assert tenant.computed >= plain.engine.queues.tenants["t"].computed


def test_several_streams_are_drafted_together():
    pair = Pair()
    for i in range(3):
        pair.target.submit(free_text(f"s{i}", 120, seed=i))
    pair.run_until_idle()
    assert pair.target.engine.stats.model_accepted > 200
    assert pair.target.engine.stats.steps < 120


def test_a_useless_draft_model_is_switched_off_and_its_pages_are_released():
    pair = Pair(differs=1)
    pair.target.submit(free_text(n=380))
    for _ in range(200):
        pair.round()
    assert pair.target.engine.stats.model_drafted > 0
    assert not pair.drafts
    assert not pair.draft.kv.leases
    pair.run_until_idle()
    assert pair.target.engine.stats.model_accepted == 0
    assert pair.target.engine.stats.model_drafted < 60, "of 380 tokens"


@pytest.mark.parametrize("differs", [0, 1, 3])
def test_a_draft_model_as_slow_as_its_target_costs_little_in_the_long_run(differs):
    """A step of either model takes the same time, so draft tokens cost at least what they save."""
    pair = Pair(speculate=2, differs=differs)
    for world in pair.worlds:
        world.set_cost(100.0, 1.0, 0.001, is_fixed=True)
    pair.target.engine.proposer.credit = INITIAL_CREDIT
    plain_s = 101e-6
    tokens, began = 0, pair.target.now
    for i in range(16):
        pair.target.submit(submission(f"s{i}", [i, 2, 3], 390, seed=i))
        for _ in range(3000):
            pair.round(plain_s)
            if f"s{i}" in pair.target.ends:
                break
        tokens += 390
    # Without the prompt's step of each sequence, which a model without a draft model needs as well.
    spent = (pair.target.now - began) / plain_s
    assert pair.target.engine.stats.model_drafted > 20, "the draft model was tried"
    if not differs:
        assert pair.target.engine.stats.model_accepted > pair.target.engine.stats.model_drafted - 16, (
            "and its tokens were accepted"
        )
    assert spent < tokens / 0.97 + INITIAL_CREDIT
    pair.run_until_idle()


def test_prompt_lookup_is_used_where_it_has_a_match():
    pair = Pair(period=10)
    pair.draft.worker.period = 10
    pair.target.submit(submission("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3, 200, seed=3))
    pair.run_until_idle()
    stats = pair.target.engine.stats
    assert stats.accepted > stats.model_accepted > 0


def test_waiting_for_draft_tokens_is_bounded():
    pair = Pair()
    pair.target.submit(free_text())
    waiting = 0
    while "a" not in pair.target.ends:
        pair.run_round()
        for world in pair.worlds:
            world.exchange_with_kv()
            world.collect()
        pair.target.compute_step()
        if pair.drafts and pair.drafts[0].run.computed < 20:
            pair.draft.compute_step()  # after that its worker computes nothing more
        delay = pair.target.engine.steps.delay_s(pair.target.now)
        if not pair.target.engine.steps.unacknowledged and pair.target.engine.table.live and pair.drafts:
            assert delay < 0.05
            waiting += 1
            pair.advance(delay + 1e-6)
    assert waiting > 0
    pair.run_until_idle()


def test_requests_of_the_draft_model_go_before_draft_sequences():
    pair = Pair()
    pair.target.submit(free_text(n=300))
    while pair.target.engine.stats.model_accepted < 20:
        pair.round()
    pair.draft.submit(submission("own", [9] * 40, 30))
    while "own" not in pair.draft.ends:
        before = pair.draft.engine.table.live["own"].run.planned if "own" in pair.draft.engine.table.live else 0
        mine = len(pair.draft.engine.steps.unacknowledged)
        pair.round()
        for step in list(pair.draft.engine.steps.unacknowledged)[mine:]:
            assert before == 0 or all(entry.sequence.id == "own" for entry in step.entries)
    assert "a" not in pair.target.ends, "the target has continued meanwhile"
    pair.run_until_idle()


def test_draft_sequences_are_dismissed_when_pages_run_short():
    pair = Pair(draft_pages=26)
    pair.target.submit(free_text(n=300))
    while not pair.target.engine.stats.model_accepted:
        pair.round()
    assert pair.drafts
    pair.draft.submit(submission("own", [9] * 380, 10))
    pair.run_until_idle()
    assert pair.draft.ends == {"own": "length"}


def test_pages_are_released_when_the_target_ends_or_is_preempted():
    for how in ("cancel", "preempt", "worker", "idle", "unlink"):
        pair = Pair()
        pair.target.submit(free_text(n=300))
        while not pair.target.engine.stats.model_accepted:
            pair.round()
        assert pair.draft.kv.leases
        (sequence,) = pair.target.engine.table.scheduled
        if how == "cancel":
            pair.target.cancel("a")
        elif how == "preempt":
            pair.target.engine.table.preempt(sequence)
        elif how == "worker":
            pair.target.kill_worker()
        elif how == "unlink":
            pair.target.engine.proposer.set_link(None)
        while pair.draft.compute_step():
            pair.draft.run_round()
        if how == "idle":
            pair.draft.advance(IDLE_S + 0.1)
        else:
            pair.target.run_round() if how == "cancel" else None
            while pair.target.engine.steps.unacknowledged:
                pair.target.compute_step()
                pair.target.engine.steps.complete(pair.target.now)
        pair.draft.run_round()
        pair.draft.exchange_with_kv()
        assert not pair.drafts, how
        assert not pair.draft.kv.leases, how
        pair.target.collect()
        pair.run_until_idle()


def test_drafting_resumes_after_a_death_of_the_draft_models_worker_or_kv():
    pair = Pair()
    pair.target.submit(free_text(n=380))
    for disturb in (pair.draft.kill_worker, pair.draft.restart_kv, lambda: pair.draft.kill_worker(half_way=True)):
        before = pair.target.engine.stats.model_accepted
        while pair.target.engine.stats.model_accepted <= before + 8:
            pair.round()
            assert "a" not in pair.target.ends
        disturb()
    pair.run_until_idle()
    assert pair.target.engine.stats.model_accepted > 60


def test_a_text_that_ends_the_draft_models_workers_is_not_drafted_for_again():
    """Its requests are ended by the quarantine, see recovery/quarantine.py; a draft sequence is in none."""
    pair = Pair()
    pair.draft.worker.poison = {2}
    pair.target.submit(free_text(n=380))
    pair.run_until_idle()
    assert pair.draft.generation == 1 + CULPRIT_AT
    pair.draft.worker.poison.clear()
    pair.target.submit(free_text("b"))
    pair.run_until_idle()
    assert pair.target.engine.stats.model_accepted > 100


def test_a_shorter_context_of_the_draft_model_ends_drafting_there():
    pair = Pair(draft_context=100)
    pair.target.submit(free_text(n=300))
    pair.run_until_idle()
    stats = pair.target.engine.stats
    assert 60 < stats.model_accepted < 100


@pytest.mark.parametrize("salt", ["mine", with_adapter("mine", "ab" * 32)])
def test_private_pages_stay_private(salt):
    """A draft sequence uses the cache salt of its target, so no other request shares its pages.

    No adapter computes it: requests of the draft model that one of this digest computes must not share its pages.
    """
    pair = Pair()
    acquired = []
    acquire = pair.draft.kv._acquire
    pair.draft.kv._acquire = lambda frame: (acquired.append(frame), acquire(frame))[1]  # type: ignore[method-assign]
    pair.target.submit(free_text(cache_salt=salt))
    pair.run_until_idle()
    assert {frame.salt for frame in acquired} == {"mine"}


@pytest.mark.parametrize("differs", [2, 3, 5])
def test_cached_pages_of_draft_sequences_are_correct(differs):
    """A request of the draft model with the target's text shares its pages, and gets the tokens of a run alone."""
    pair, alone = Pair(differs=differs), World(cache=False)
    alone.worker.differs = differs
    pair.target.submit(free_text(n=200))
    pair.run_until_idle()
    assert pair.target.engine.stats.model_drafted > pair.target.engine.stats.model_accepted > 5
    text = [1, 2, 3, *pair.target.tokens["a"]]
    for world in (pair.draft, alone):
        world.submit(submission("own", text, 50))
        world.run_until_idle()
    assert pair.draft.engine.stats.prompt_cached >= 16, "it shared pages"
    assert pair.draft.tokens == alone.tokens


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 2**32),
    differs=st.sampled_from([0, 0, 1, 2, 5, 20]),
    pages=st.integers(26, 70),
    draft_pages=st.integers(8, 70),
    batch=st.integers(1, 5),
    period=st.sampled_from([0, 0, 11]),
    disturb=st.booleans(),
    shares_cores=st.booleans(),
)
# The link is removed while steps are published ahead.
@example(seed=137, differs=0, pages=26, draft_pages=8, batch=1, period=0, disturb=True, shares_cores=False)
def test_random_events_change_no_token_and_leave_nothing(
    seed, differs, pages, draft_pages, batch, period, disturb, shares_cores
):
    rng = random.Random(seed)
    pair = Pair(
        differs=differs,
        pages=pages,
        draft_pages=draft_pages,
        batch=batch,
        period=period,
        shares_cores=shares_cores,
        run_ahead=rng.random() < 0.8,
        speculate=rng.choice([2, 8, 16]),
        draft_context=rng.choice([60, 400]),
    )
    pair.draft.worker.period = pair.draft.period = period
    n = 0
    for _ in range(rng.randrange(30, 250)):
        action, world = rng.random(), rng.choice(pair.worlds)
        if action < 0.05:
            n += 1
            own = world is pair.draft and rng.random() < 0.3
            where = pair.draft if own else pair.target
            where.submit(
                submission(
                    f"s{n}",
                    [rng.randrange(90) for _ in range(rng.randrange(1, 60))],
                    rng.randrange(1, 25) if own else rng.randrange(1, 150),
                    seed=rng.randrange(5),
                    stop=rng.random() < 0.3,
                    logprobs=rng.choice([-1, 0]),
                    deadline_ms=rng.choice([0, 0, 0, 40_000]),
                    speculate=rng.choice([0, 0, 0, -1, 5]),
                )
            )
        elif action < 0.07 and pair.target.submitted:
            pair.target.cancel(rng.choice(list(pair.target.submitted)))
        elif action < 0.15:
            pair.run_round()
        elif action < 0.25:
            world.compute_step()
        elif action < 0.32:
            world.exchange_with_kv(rng.choice([1, 2, 100]))
        elif action < 0.34:
            pair.advance(rng.choice([0.001, 0.01, 2.0, 15.0]))
        elif disturb and action < 0.36:
            world.run_round()
            world.kill_worker(half_way=rng.random() < 0.5)
        elif disturb and action < 0.38:
            world.restart_kv()
        elif disturb and action < 0.40:
            pair.target.engine.proposer.set_link(rng.choice([None, pair.link]))
        elif disturb and action < 0.41 and world.engine.table.scheduled:
            sequence = rng.choice(world.engine.table.scheduled)
            if not sequence.is_done and not sequence.is_preempting and sequence.phase is not Phase.PENDING:
                world.engine.table.preempt(sequence)
        else:
            pair.round()
        for each in pair.worlds:
            each.collect()
            each.check_bounds()
    pair.run_until_idle()
    assert pair.target.engine.stats.model_accepted <= pair.target.engine.stats.model_drafted


@pytest.mark.parametrize("rounds", range(4))
def test_a_draft_model_may_be_unloaded_between_two_steps(rounds: int) -> None:
    """Steps that run ahead are composed after the link to the draft model was removed."""
    pair = Pair(batch=1)
    world = pair.target
    world.submit(free_text("s", 100))
    while not world.engine.steps.unacknowledged:
        world.run_round()
        world.exchange_with_kv()
    for _ in range(rounds):
        pair.round()
    world.run_round()
    world.engine.proposer.set_link(None)
    pair.run_until_idle()
    assert not pair.drafts


def test_draft_sequences_are_freed_without_the_garbage_collector():
    pair = Pair()
    gc.collect()
    gc.disable()
    try:
        seen = []
        for i in range(20):
            pair.target.submit(free_text(f"s{i}", 40, seed=i))
            pair.round()
            for _ in range(40):
                pair.round()
                seen.extend(weakref.ref(draft) for draft in pair.drafts)
            pair.run_until_idle()
        assert seen
        assert not [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("speculate", [0, -1])
def test_without_speculation_there_are_no_draft_sequences(speculate):
    pair = Pair(speculate=0)
    pair.target.submit(free_text(speculate=speculate))
    pair.run_until_idle()
    assert pair.draft.engine.stats.steps == 0
