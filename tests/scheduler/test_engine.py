"""The life of sequences between a worker and a kv manager that can be disturbed at will."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.protocol.messages import Cancel, Commit, Denied, Extend
from stages.scheduler.core.leases import EXTEND_AHEAD
from stages.scheduler.core.row_scheduler import PREFETCH
from stages.scheduler.core.sequence import Phase
from stages.scheduler.policy.pacing import PacingPolicy

from .peers import reference, submission
from .world import GATEWAY, World

PACING = PacingPolicy()


def prompt(rng: random.Random, most: int = 120) -> list[int]:
    # Few distinct tokens and common beginnings: prefixes are shared, n-grams repeat.
    head = list(range(10, 10 + rng.choice([0, 8, 16, 40])))
    return head + [rng.randrange(90) for _ in range(rng.randrange(1, most))]


def test_one_sequence_gets_the_tokens_of_an_undisturbed_run():
    world = World()
    frame = submission("a", [1, 2, 3], 20)
    world.submit(frame)
    world.settle()
    assert (world.tokens["a"], world.ends["a"]) == reference(frame)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_run_ahead_changes_no_token(run_ahead):
    world = World(run_ahead=run_ahead, batch=8)
    rng = random.Random(7)
    for i in range(20):
        world.submit(submission(f"s{i}", prompt(rng), rng.randrange(1, 60), seed=i, stop=True))
    world.settle()
    world.check_all()
    assert {world.ends[name] for name in world.submitted} == {"stop", "length"}


def test_next_step_is_published_before_the_last_one_is_done():
    world = World()
    world.set_cost(4_000.0, 1.0, 0.001)
    world.submit(submission("a", [1, 2, 3], 20))
    world.run_round()
    world.talk_to_kv()
    assert world.run_round() == 2
    assert world.worker.waiting == 2


def test_short_steps_run_ahead_for_a_few_milliseconds_and_are_heard_of_together():
    world = World()
    engine = world.engine
    world.set_cost(4_000.0, 1.0, 0.001, is_fixed=True)
    world.submit(submission("a", [1, 2, 3], 40))
    world.run_round()
    world.talk_to_kv()
    assert world.run_round() == 2, "a first token is waited for"
    assert engine.steps.wake_step == engine.steps.unacknowledged[0].number
    world.work()
    assert world.run_round() == 3
    assert len(engine.steps.unacknowledged) == 4, "while less than `wake_s` is under way"
    for _ in range(20):
        assert engine.steps.wake_step == engine.steps.unacknowledged[-2].number
        world.work()
        world.run_round()
    world.submit(submission("b", [4, 5], 20))
    assert engine.steps.wake_step == engine.steps.unacknowledged[0].number, (
        "who waits in a queue is looked after at each end"
    )
    world.settle()
    world.check_all()


def test_kv_is_told_of_all_streams_at_once() -> None:
    """Whatever the lengths of their prompts: it is woken once in some tens of steps, not for each stream."""
    world = World(batch=8, pages=256)
    engine = world.engine
    world.set_cost(12_000.0, 1.0, 0.001, is_fixed=True)
    for i in range(8):
        world.submit(submission(f"s{i}", list(range(3 + 5 * i)), 150))
    engine.leases.set_free_pages(256, 8)
    rounds = told = asked = 0
    while engine.is_busy:
        world.run_round()
        is_steady = len(engine.table.scheduled) == 8 and all(s.phase is Phase.DECODING for s in engine.table.scheduled)
        rounds += is_steady
        told += is_steady and any(isinstance(frame, Commit) for frame in engine.leases.frames)
        asked += is_steady and any(isinstance(frame, Extend) for frame in engine.leases.frames)
        for s in engine.table.scheduled:
            assert s.run.computed - (s.run.committed // 16 + 1) * 16 < PACING.commit_delay_tokens
        world.talk_to_kv()
        world.work()
    assert rounds > 100
    assert 3 <= told <= 2 + rounds / PACING.commit_delay_tokens
    assert 2 <= asked <= 2 + rounds / (engine.leases.stride * engine.leases.page_tokens // 2)
    world.settle()
    world.check_all()


@pytest.mark.parametrize(
    ("streams", "step_us", "at_most"),
    [
        (1, 900.0, PACING.max_depth),
        (1, 4_000.0, 4),
        (8, 4_000.0, 4),
        (1, 9_000.0, 2),
        (1, 14_500.0, 2),
        (12, 5_500.0, 5),
        (16, 7_000.0, 5),
        (16, 9_000.0, 4),
        (16, 14_500.0, 3),
        (16, 15_500.0, 2),
        (24, 19_000.0, 3),
        (24, 21_000.0, 2),
    ],
)
def test_how_many_steps_are_under_way_at_once(streams: int, step_us: float, at_most: int) -> None:
    """The more streams there are to be told, the fewer words."""
    world = World(batch=24, pages=256)
    engine = world.engine
    world.set_cost(step_us, 1.0, 0.001, is_fixed=True)
    for i in range(streams):
        world.submit(submission(f"s{i}", [1, 2, 3 + i], 60))
    for _ in range(3 + streams):
        world.run_round()
        world.talk_to_kv()
        world.work()
    most = 0
    for _ in range(20):
        world.run_round()
        most = max(most, len(engine.steps.unacknowledged))
        world.work()
    assert most == at_most
    world.settle()
    world.check_all()


def test_the_last_token_that_a_stream_may_have_is_heard_of():
    world = World(batch=4)
    world.submit(submission("a", [1, 2, 3], 6))
    world.submit(submission("b", [4, 5], 60))
    last = 0
    while "a" not in world.ends:
        world.run_round()
        world.talk_to_kv()
        for step in world.engine.steps.unacknowledged:
            if any(e.sequence.id == "a" and e.start == 3 + 6 - 2 for e in step.entries):
                last = step.number
        if last:
            assert world.engine.steps.wake_step <= last
        world.work()
        world.run_round()
        world.collect()
    assert last
    world.settle()
    world.check_all()


def test_a_stream_that_drafts_is_not_run_ahead_of_and_one_without_success_is():
    world = World(speculate=4, period=3, batch=1)  # what is generated repeats itself
    world.submit(submission("a", [1, 2, 3], 200))
    engine = world.engine
    ahead = []
    while "a" not in world.ends:
        world.run_round()
        world.talk_to_kv()
        ahead.append((bool(engine.stats.drafted), len(engine.steps.unacknowledged)))
        world.work()
        world.run_round()
        world.collect()
    assert max(n for is_drafting, n in ahead if not is_drafting) == PACING.max_depth
    assert engine.stats.accepted > 100
    assert all(n <= 2 for is_drafting, n in ahead[-20:])
    world.settle()
    world.check_all()


def test_tokens_past_a_stop_are_discarded_and_pages_wait_for_them():
    frame = next(
        f
        for seed in range(1000)
        if 3 < len(reference(f := submission("a", [1, 2, 3], 50, seed=seed, stop=True))[0]) < 20
    )
    world = World()
    world.submit(frame)
    world.run_round()
    world.talk_to_kv()
    while "a" not in world.ends:
        world.work()
        world.run_round()
        world.collect()
    assert world.engine.steps.unacknowledged, "a step ran ahead of the stop"
    assert world.kv.leases == {"a": world.kv.leases["a"]}, "its pages are still written to"
    world.settle()
    world.check_all()
    assert world.engine.stats.discarded == PACING.max_depth - 1


@settings(max_examples=300, deadline=None)
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
            world.work()
        elif action < 0.9:
            world.talk_to_kv(rng.choice([1, 2, 100]))
        elif action < 0.94:
            world.advance(rng.choice([0.01, 1.0, 15.0]))
        elif disturb and action < 0.97:
            world.run_round()
            world.kill_worker(half_way=rng.random() < 0.5)
        elif disturb:
            world.restart_kv()
        world.collect()
    world.settle()
    world.check_all()


def test_when_pages_run_out_the_youngest_is_set_aside_and_ends_with_its_tokens():
    world = World(batch=4, pages=24, page_tokens=16, cache=False)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1] * 40, 200, seed=i))
    world.settle()
    world.check_all()
    assert world.engine.stats.preemptions > 0
    assert all(end == "length" for end in world.ends.values())


def test_a_poisoned_sequence_ends_with_an_error_and_the_others_with_their_tokens():
    world = World(batch=8)
    world.worker.poison = {100}
    for i in range(6):
        world.submit(submission(f"s{i}", [10 + i] * 20 + ([100] if i == 3 else []) + [7], 30, seed=i))
    world.settle()
    assert world.ends.pop("s3") == "error"
    assert world.errors["s3"] == "INFERENCE"
    assert set(world.ends.values()) == {"length"}
    for name in world.ends:
        assert world.tokens[name] == reference(world.submitted[name])[0]
    assert world.engine.stats.culprits == 1


def test_a_worker_killed_again_and_again_convicts_nobody_who_moves_on():
    world = World(batch=4)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1] * 30, 40, seed=i))
    for _ in range(30):
        world.run_round()
        world.talk_to_kv()
        world.run_round()
        world.work()
        world.run_round()
        world.kill_worker()
    world.settle()
    world.check_all()
    assert set(world.ends.values()) == {"length"}


def test_the_next_step_is_published_earlier_where_steps_end_before_it_is():
    world = World(batch=2, context=400)
    world.submit(submission("a", [1, 2, 3], 300))
    engine = world.engine
    for _ in range(4):
        world.run_round()
        world.talk_to_kv()
    leads = []
    for _ in range(8):
        world.set_cost(40_000.0, 1.0, 0.001)  # each round it expects 40 ms again
        while len(engine.steps.unacknowledged) > 1:
            world.work()
            world.run_round()
        assert len(engine.steps.unacknowledged) == 1, "the next one waits for the end of this one"
        engine.steps.unacknowledged[0].expected_s = 0.04
        world.run_round()
        leads.append(engine.steps.lead.seconds)
        world.now += 0.02  # it ends half way, and nobody was told
        if engine.steps.publish_wait_s(world.now) > 0:
            world.work()
        world.run_round()
    assert leads[:4] == pytest.approx(
        [PACING.min_lead_s, 2 * PACING.min_lead_s, 4 * PACING.min_lead_s, 8 * PACING.min_lead_s], rel=0.05
    )
    assert max(leads) < 8.1 * PACING.min_lead_s, "24 ms before the end is early enough"
    world.settle()
    assert world.tokens["a"] == reference(submission("a", [1, 2, 3], 300))[0]
    assert engine.steps.lead.seconds == pytest.approx(PACING.min_lead_s, rel=1.0), "and no earlier than need be"


def test_limits_are_refused_with_code_and_field():
    world = World(max_prompt_tokens=100, max_output_tokens=50, pages=8, page_tokens=16)
    refused = {
        "long": (submission("long", [1] * 101, 5), "INVALID_REQUEST"),
        "much": (submission("much", [1], 51), "INVALID_REQUEST"),
        "id": (submission("id", [1, 1000], 5), "INVALID_REQUEST"),
        "fit": (submission("fit", [1] * 100, 40), "INSUFFICIENT_RESOURCES"),
        "none": (submission("none", [], 40), "INVALID_REQUEST"),
    }
    for frame, _ in refused.values():
        world.submit(frame)
    world.collect()
    assert world.errors == {name: code for name, (_, code) in refused.items()}
    world.submit(submission("exact", [1] * 99, 30))
    world.settle()
    assert world.ends["exact"] == "length"


def test_a_context_is_filled_to_its_last_position():
    world = World(context=64)
    world.submit(submission("over", [1] * 40, 25))
    world.submit(submission("full", [1] * 40, 24))
    world.settle()
    assert world.errors["over"] == "CONTEXT_LENGTH_EXCEEDED"
    assert world.ends["full"] == "length"
    assert len(world.tokens["full"]) == 24


def test_a_full_queue_answers_with_the_time_to_wait():
    world = World(max_queue_depth=3, batch=1)
    for i in range(7):  # one computes, two stand by, three wait
        world.submit(submission(f"s{i}", [1, 2], 100))
    rejected = world.engine.outbox.rejected[-1][1]
    assert rejected.code == "OVERLOADED"
    assert rejected.retry_after_s >= 1
    for name in ("one", "another"):  # which is taken up at once
        world.submit(submission(name, [1], 5, tenant="quiet"))
    assert [frame.sequence for _, frame in world.engine.outbox.rejected] == ["s6", "s5"], "the newest makes room"


def test_a_tenant_that_fills_its_own_queue_takes_no_place_of_others():
    world = World(max_queue_depth=100, max_tenant_depth=3, batch=1)
    for i in range(8):  # one computes, two stand by, three wait
        world.submit(submission(f"s{i}", [1, 2], 100))
    rejected = [frame for _, frame in world.engine.outbox.rejected]
    assert [frame.sequence for frame in rejected] == ["s6", "s7"]
    assert rejected[0].code == "OVERLOADED" and "at most 3" in rejected[0].message
    assert rejected[0].retry_after_s >= 1
    for i in range(3):
        world.submit(submission(f"q{i}", [1], 5, tenant="quiet"))
    assert len(world.engine.outbox.rejected) == 2
    world.settle()
    assert sorted(world.ends.values()) == ["length"] * 9 + ["rejected"] * 2
    world.submit(submission("later", [1], 5))
    world.settle()
    assert world.ends["later"] == "length", "there is room again"


def test_the_time_to_wait_follows_the_backlog():
    waits = []
    for depth in (10, 100, 1000):
        world = World(max_queue_depth=5000, max_tenant_depth=depth, batch=4, context=400)
        world.set_cost(20_000.0, 100.0, 0.001)
        for i in range(world.settings.max_batch_size + PREFETCH + depth + 1):
            world.submit(submission(f"s{i}", [1, 2] * 20, 100))
        waits.append(world.engine.outbox.rejected[0][1].retry_after_s)
    assert waits[0] < waits[1] < waits[2]
    assert 5 < waits[2] / waits[1] < 15


def test_time_over_ends_with_an_error_and_frees_the_pages():
    world = World()
    world.submit(submission("a", [1, 2, 3], 300, deadline_ms=1000))
    for _ in range(10):
        world.run_round()
        world.talk_to_kv()
        world.work()
    world.advance(1.5)
    world.settle()
    assert (world.ends["a"], world.errors["a"]) == ("timeout", "TIMEOUT")
    world.check_all()


def test_a_cancel_for_an_unknown_sequence_is_counted_and_ignored():
    world = World()
    world.engine.submissions.cancel(Cancel("nobody"))
    assert world.engine.stats.late == 1


def test_a_sequence_submitted_anew_goes_on_from_what_was_computed():
    world = World()
    frame = submission("a", [1, 2, 3], 60)
    world.submit(frame)
    for _ in range(30):
        world.run_round()
        world.talk_to_kv()
        world.work()
    world.collect()
    got = list(world.tokens["a"])
    world.engine.table.detach_gateway(GATEWAY, world.now)
    for _ in range(10):
        world.run_round()
        world.work()
    assert not world.engine.outbox.tokens
    computed = world.engine.stats.prompt_computed
    world.engine.submissions.submit(GATEWAY, submission("a", [1, 2, 3], 60, forced=got), world.now)
    world.settle()
    assert world.tokens["a"] == reference(frame)[0]
    assert world.engine.stats.prompt_computed == computed, "nothing was computed again"


def test_an_orphan_is_given_up_in_the_end():
    world = World()
    world.submit(submission("a", [1, 2, 3], 300))
    world.run_round()
    world.talk_to_kv()
    world.engine.table.detach_gateway(GATEWAY, world.now)
    world.advance(11.0)
    world.settle()
    assert world.ends == {}
    assert not world.engine.table.live


def test_speculation_changes_no_token_and_saves_steps():
    frame = submission("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 150, seed=3)
    plain, fast = World(period=10), World(period=10, speculate=8)
    for world in (plain, fast):
        world.submit(frame)
        world.settle()
        world.check_all()
    assert plain.tokens == fast.tokens
    assert fast.engine.stats.steps < 0.6 * plain.engine.stats.steps
    assert fast.engine.stats.accepted > 50


def test_speculation_falls_silent_on_text_that_does_not_repeat():
    world = World(speculate=8)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1, 2, 3], 300, seed=i))
    world.settle()
    world.check_all()
    assert world.engine.stats.drafted < 60, "of 1200 tokens"


def test_a_request_may_speculate_or_not_whatever_the_model_says():
    on, off = World(period=4), World(period=4, speculate=8)
    for world, speculate in ((on, 4), (off, -1)):
        world.submit(submission("a", [1, 2, 3, 4] * 3, 100, speculate=speculate))
        world.settle()
        world.check_all()
    assert on.engine.stats.accepted > 0
    assert off.engine.stats.drafted == 0


def test_prompts_that_begin_alike_are_computed_once():
    world = World(batch=8, pages=64)
    shared = [50 + i % 30 for i in range(160)]
    for i in range(8):
        world.submit(submission(f"s{i}", [*shared, i], 10, seed=i))
    world.settle()
    world.check_all()
    stats = world.engine.stats
    assert stats.prompt_computed == 161 + 7
    assert stats.prompt_cached == 7 * 160


def test_who_waits_for_a_neighbour_that_goes_away_computes_itself():
    world = World(batch=8, pages=64, max_step_tokens=16)
    shared = [50 + i % 30 for i in range(160)]
    for i in range(3):
        world.submit(submission(f"s{i}", [*shared, i], 10, seed=i))
    world.run_round()
    world.talk_to_kv()
    world.run_round()
    world.work()
    world.cancel("s0")
    world.settle()
    world.check_all()
    assert {world.ends["s1"], world.ends["s2"]} == {"length"}


def test_other_contents_of_the_kv_arena_begin_everything_anew():
    world = World(batch=4)
    for i in range(6):
        world.submit(submission(f"s{i}", [i + 1] * 30, 40, seed=i))
    for _ in range(20):
        world.run_round()
        world.talk_to_kv()
        world.work()
    world.collect()
    # kv comes back with an arena of another generation: no page of the old one may be used again.
    world.engine.kv_down()
    world.to_kv.clear()
    world.kv.fresh()
    world.kv.generation += 1
    assert world.engine.kv_ready(world.kv.ready())
    world.engine.halt(world.now)
    while world.work():  # in the old arena, which it still has mapped
        pass
    world.pages.states[:] = -1
    world.engine.detached(world.now)
    world.attach()
    world.settle()
    world.check_all()
    assert set(world.ends.values()) == {"length"}


def test_who_asked_early_and_got_nothing_does_not_stand_still() -> None:
    world = World(batch=2)
    engine = world.engine
    world.submit(submission("s", [1] * 30, 60))
    world.run_round()
    world.talk_to_kv()
    world.run_round()
    (sequence,) = engine.table.scheduled
    run = sequence.run
    assert run.planned <= run.leased - EXTEND_AHEAD
    at = run.extend_at
    engine.leases.extend(run)
    engine.leases.frames.clear()
    engine.pages.denied(Denied(run.pending_id, "s", True, 4, 0, 64))
    assert (run.is_starved, run.pending_id, run.extend_at) == (False, 0, at)
    world.settle()
    world.check_all()


def test_a_lease_that_kv_does_not_recognise_is_acquired_anew():
    world = World(batch=4)
    for i in range(3):
        world.submit(submission(f"s{i}", [i + 1] * 30, 40, seed=i))
    for _ in range(10):
        world.run_round()
        world.talk_to_kv()
        world.work()
    world.engine.pages.denied(Denied(0, "s1", True, 0, 0, 0))
    world.settle()
    world.check_all()
    assert set(world.ends.values()) == {"length"}


@pytest.mark.parametrize("half_way", [False, True])
def test_a_verification_that_dies_with_its_worker_is_repeated(half_way):
    world = World(period=10, speculate=8, batch=2)
    for i in range(2):
        world.submit(submission(f"s{i}", [20 * i + k for k in range(1, 11)], 150, seed=i))
    deaths = 0
    for _ in range(2000):
        world.run_round()
        world.talk_to_kv()
        if any(step.is_verifying for step in world.engine.steps.unacknowledged) and deaths < 40:
            deaths += 1
            world.kill_worker(half_way)
            world.run_round()
        world.work()
        world.run_round()
        world.collect()
        if not world.engine.is_busy:
            break
    world.check_all()
    assert deaths > 10
    assert set(world.ends.values()) == {"length"}


def test_whoever_is_set_aside_computes_no_further():
    world = World(batch=2, pages=8, page_tokens=16, cache=False)
    for i in range(2):
        world.submit(submission(f"s{i}", [i + 1] * 40, 80, seed=i))
    for _ in range(500):
        world.run_round()
        world.talk_to_kv()
        world.work()
        if world.engine.stats.preemptions:
            break
    young = world.engine.table.scheduled[-1]
    if young.is_preempting:
        for _ in range(2):
            world.work()
            world.run_round()
    assert young.phase is Phase.PENDING
    world.settle()
    world.check_all()


def test_what_has_ended_is_forgotten_before_its_deadline():
    world = World(batch=4, max_queue_depth=2000)
    ended = []
    for i in range(300):
        world.submit(submission(f"s{i}", [i % 90, 2], 3, deadline_ms=300_000))
        ended.append(weakref.ref(world.engine.table.live[f"s{i}"]))
        if i % 3 == 0:
            world.cancel(f"s{i}")
    world.settle()
    world.check_all()
    world.engine.tick(world.now)
    gc.collect()
    assert sum(ref() is not None for ref in ended) < 100
    assert world.engine.queues.heap_size == 0
