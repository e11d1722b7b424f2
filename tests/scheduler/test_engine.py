"""The life of sequences between a worker and a kv manager that can fail at any time."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.protocol.messages import Cancel, Denied
from stages.scheduler.core.leases import EXTEND_AHEAD
from stages.scheduler.core.sequence import Phase
from stages.scheduler.policy.pacing import PacingPolicy
from tests.properties import examples

from .peers import reference, submission
from .world import World

PACING = PacingPolicy()


def prompt(rng: random.Random, most: int = 120) -> list[int]:
    # Few distinct tokens and common prefixes, so that prompts share pages and n-grams repeat.
    head = list(range(10, 10 + rng.choice([0, 8, 16, 40])))
    return head + [rng.randrange(90) for _ in range(rng.randrange(1, most))]


def test_one_sequence_gets_the_tokens_of_an_undisturbed_run():
    world = World()
    frame = submission("a", [1, 2, 3], 20)
    world.submit(frame)
    world.run_until_idle()
    assert (world.tokens["a"], world.ends["a"]) == reference(frame)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_run_ahead_changes_no_token(run_ahead):
    world = World(run_ahead=run_ahead, batch=8)
    rng = random.Random(7)
    for i in range(20):
        world.submit(submission(f"s{i}", prompt(rng), rng.randrange(1, 60), seed=i, stop=True))
    world.run_until_idle()
    world.check_all()
    assert {world.ends[name] for name in world.submitted} == {"stop", "length"}


def test_tokens_past_a_stop_are_discarded_and_pages_wait_for_them():
    frame = next(
        f
        for seed in range(1000)
        if 3 < len(reference(f := submission("a", [1, 2, 3], 50, seed=seed, stop=True))[0]) < 20
    )
    world = World()
    world.submit(frame)
    world.run_round()
    world.exchange_with_kv()
    while "a" not in world.ends:
        world.compute_step()
        world.run_round()
        world.collect()
    assert world.engine.steps.unacknowledged, "a step was published ahead of the stop"
    assert world.kv.leases == {"a": world.kv.leases["a"]}, "steps still write to its pages"
    world.run_until_idle()
    world.check_all()
    assert world.engine.stats.discarded == PACING.max_depth - 1


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 9),
    pages=st.integers(26, 80),
    page_tokens=st.sampled_from([16, 32]),
    ahead=st.booleans(),
    step_tokens=st.sampled_from([16, 40, 512]),
    speculate=st.sampled_from([0, 0, 4, 16]),
    period=st.sampled_from([0, 3, 11]),
    disturb=st.booleans(),
)
def test_random_arrivals_end_once_with_their_tokens(
    seed, batch, pages, page_tokens, ahead, step_tokens, speculate, period, disturb
):
    rng = random.Random(seed)
    world = World(
        batch=batch,
        pages=pages,
        page_tokens=page_tokens,
        run_ahead=ahead,
        max_step_tokens=step_tokens,
        max_queue_depth=12,
        speculate=speculate,
        cache=rng.random() < 0.7,
        period=period,
    )
    n = 0
    for _ in range(rng.randrange(20, 150)):
        action = rng.random()
        if action < 0.25:
            n += 1
            frame = submission(
                f"s{n}",
                prompt(rng),
                rng.randrange(1, 70),
                seed=rng.randrange(5),
                stop=rng.random() < 0.7,
                tenant=rng.choice("abc"),
                priority=rng.choice([0, 0, 3]),
                deadline_ms=rng.choice([0, 0, 0, 40_000]),
                logprobs=rng.choice([-1, 0]),
            )
            if rng.random() < 0.2:
                forced, _ = reference(frame, period)
                frame = submission(
                    f"s{n}",
                    list(memoryview(frame.prompt).cast("i")),
                    frame.max_tokens,
                    seed=frame.sampling.seed,
                    stop=bool(frame.stop_ids),
                    forced=forced[: rng.randrange(len(forced) + 1)],
                )
            world.submit(frame)
        elif action < 0.3 and world.submitted:
            world.cancel(rng.choice(list(world.submitted)))
        elif action < 0.55:
            world.run_round()
        elif action < 0.75:
            world.compute_step()
        elif action < 0.9:
            world.exchange_with_kv(rng.choice([1, 2, 100]))
        elif action < 0.94:
            world.advance(rng.choice([0.01, 1.0, 15.0]))
        elif disturb and action < 0.97:
            world.run_round()
            world.kill_worker(half_way=rng.random() < 0.5)
        elif disturb:
            world.restart_kv()
        world.collect()
    world.run_until_idle()
    world.check_all()


def test_when_pages_run_out_the_youngest_is_preempted_and_ends_with_its_tokens():
    world = World(batch=4, pages=24, page_tokens=16, cache=False)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1] * 40, 200, seed=i))
    world.run_until_idle()
    world.check_all()
    assert world.engine.stats.preemptions > 0
    assert all(end == "length" for end in world.ends.values())


def test_a_priority_preempts_no_sequence_of_another_tenant(monkeypatch):
    """It orders a tenant's own requests: of the tenant with the youngest one the last one goes."""
    world = World(batch=4, pages=24, page_tokens=16, cache=False)
    preempted = []
    table, preempt = world.engine.table, world.engine.table.preempt
    monkeypatch.setattr(table, "preempt", lambda sequence: (preempted.append(sequence.id), preempt(sequence)))
    world.submit(submission("quiet", [9] * 40, 200, tenant="quiet"))
    for i, priority in enumerate((100, 0, 50)):
        world.submit(submission(f"s{i}", [i + 1] * 40, 200, seed=i, tenant="other", priority=priority))
    world.run_until_idle()
    world.check_all()
    assert preempted[0] == "s1"
    assert "quiet" not in preempted


def test_a_deadline_ends_the_sequence_with_an_error_and_frees_its_pages():
    world = World()
    world.submit(submission("a", [1, 2, 3], 300, deadline_ms=1000))
    for _ in range(10):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.advance(1.5)
    world.run_until_idle()
    assert (world.ends["a"], world.errors["a"]) == ("timeout", "TIMEOUT")
    world.check_all()


def test_a_cancel_for_an_unknown_sequence_is_counted_and_ignored():
    world = World()
    world.engine.submissions.cancel(Cancel("unknown"))
    assert world.engine.stats.late == 1


def test_speculation_changes_no_token_and_saves_steps():
    frame = submission("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 150, seed=3)
    plain, fast = World(period=10), World(period=10, speculate=8)
    for world in (plain, fast):
        world.submit(frame)
        world.run_until_idle()
        world.check_all()
    assert plain.tokens == fast.tokens
    assert fast.engine.stats.steps < 0.6 * plain.engine.stats.steps
    assert fast.engine.stats.accepted > 50


def test_speculation_pauses_on_text_that_does_not_repeat():
    world = World(speculate=8)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1, 2, 3], 300, seed=i))
    world.run_until_idle()
    world.check_all()
    assert world.engine.stats.drafted < 60, "of 1200 tokens"


def test_a_request_overrides_the_speculation_of_the_model():
    on, off = World(period=4), World(period=4, speculate=8)
    for world, speculate in ((on, 4), (off, -1)):
        world.submit(submission("a", [1, 2, 3, 4] * 3, 100, speculate=speculate))
        world.run_until_idle()
        world.check_all()
    assert on.engine.stats.accepted > 0
    assert off.engine.stats.drafted == 0


def test_a_common_prefix_of_prompts_is_computed_once():
    world = World(batch=8, pages=64)
    shared = [50 + i % 30 for i in range(160)]
    for i in range(8):
        world.submit(submission(f"s{i}", [*shared, i], 10, seed=i))
    world.run_until_idle()
    world.check_all()
    stats = world.engine.stats
    assert stats.prompt_computed == 161 + 7
    assert stats.prompt_cached == 7 * 160


def test_followers_compute_the_prefix_when_their_leader_is_cancelled():
    world = World(batch=8, pages=64, max_step_tokens=16)
    shared = [50 + i % 30 for i in range(160)]
    for i in range(3):
        world.submit(submission(f"s{i}", [*shared, i], 10, seed=i))
    world.run_round()
    world.exchange_with_kv()
    world.run_round()
    world.compute_step()
    world.cancel("s0")
    world.run_until_idle()
    world.check_all()
    assert {world.ends["s1"], world.ends["s2"]} == {"length"}


def test_a_denied_early_extend_does_not_stop_a_sequence() -> None:
    world = World(batch=2)
    engine = world.engine
    world.submit(submission("s", [1] * 30, 60))
    world.run_round()
    world.exchange_with_kv()
    world.run_round()
    (sequence,) = engine.table.scheduled
    run = sequence.run
    assert run.planned <= run.leased - EXTEND_AHEAD
    at = run.extend_at
    engine.leases.extend(run)
    engine.leases.frames.clear()
    engine.pages.denied(Denied(run.pending_id, "s", True, 4, 0, 64))
    assert (run.is_starved, run.pending_id, run.extend_at) == (False, 0, at)
    world.run_until_idle()
    world.check_all()


def test_a_sequence_that_has_ended_is_not_failed_by_a_late_denial() -> None:
    world = World(batch=2)
    world.submit(submission("s", [1] * 30, 200))
    run = None
    while run is None or not (run.pending_id and run.inflight):  # it asks for more pages with a step
        world.run_round()
        (run,) = [sequence.run for sequence in world.engine.table.scheduled]
        if not (run.pending_id and run.inflight):
            world.exchange_with_kv()
            world.compute_step()
    world.engine.leases.frames.clear()
    world.cancel("s")
    # kv has another arena meanwhile, in which the sequence would not fit.
    world.engine.pages.denied(Denied(run.pending_id, "s", False, 9, 0, 8))
    world.run_until_idle()
    world.check_all()
    assert world.ends == {"s": "cancelled"}


def test_a_preempted_sequence_is_not_computed():
    world = World(batch=2, pages=8, page_tokens=16, cache=False)
    for i in range(2):
        world.submit(submission(f"s{i}", [i + 1] * 40, 80, seed=i))
    for _ in range(500):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
        if world.engine.stats.preemptions:
            break
    young = world.engine.table.scheduled[-1]
    if young.is_preempting:
        for _ in range(2):
            world.compute_step()
            world.run_round()
    assert young.phase is Phase.PENDING
    world.run_until_idle()
    world.check_all()


def test_ended_sequences_are_freed_before_their_deadline():
    world = World(batch=4, max_queue_depth=2000)
    ended = []
    for i in range(300):
        world.submit(submission(f"s{i}", [i % 90, 2], 3, deadline_ms=300_000))
        ended.append(weakref.ref(world.engine.table.live[f"s{i}"]))
        if i % 3 == 0:
            world.cancel(f"s{i}")
    world.run_until_idle()
    world.check_all()
    world.engine.tick(world.now)
    gc.collect()
    assert sum(ref() is not None for ref in ended) < 100
    assert world.engine.queues.heap_size == 0
