"""How far steps are published ahead, and how often the scheduler and kv are woken."""

from __future__ import annotations

import pytest

from pipeline.protocol.messages import Commit, Extend, Submit
from stages.scheduler.core.sequence import Phase
from stages.scheduler.policy.pacing import PacingPolicy

from .peers import reference, submission
from .world import World

PACING = PacingPolicy()


def test_the_next_step_is_published_before_the_current_one_is_done():
    world = World()
    world.set_cost(4_000.0, 1.0, 0.001)
    world.submit(submission("a", [1, 2, 3], 20))
    world.run_round()
    world.exchange_with_kv()
    assert world.run_round() == 2
    assert world.worker.waiting == 2


def test_short_steps_run_ahead_for_a_few_milliseconds_and_wake_the_scheduler_once():
    world = World()
    engine = world.engine
    world.set_cost(4_000.0, 1.0, 0.001, is_fixed=True)
    world.submit(submission("a", [1, 2, 3], 40))
    world.run_round()
    world.exchange_with_kv()
    assert world.run_round() == 2, "a step with a first token is not followed by further ones"
    assert engine.steps.wake_step == engine.steps.unacknowledged[0].number
    world.compute_step()
    assert world.run_round() == 3
    assert len(engine.steps.unacknowledged) == 4, "steps are published ahead for less than `wake_s`"
    for _ in range(20):
        assert engine.steps.wake_step == engine.steps.unacknowledged[-2].number
        world.compute_step()
        world.run_round()
    world.submit(submission("b", [4, 5], 20))
    assert engine.steps.wake_step == engine.steps.unacknowledged[0].number, (
        "the scheduler is woken at the end of each step while a request waits"
    )
    world.run_until_idle()
    world.check_all()


def test_commits_and_extends_of_all_streams_are_sent_together() -> None:
    """kv is woken once in some tens of steps and not for each stream, whatever the lengths of their prompts."""
    world = World(batch=8, pages=256)
    engine = world.engine
    world.set_cost(12_000.0, 1.0, 0.001, is_fixed=True)
    for i in range(8):
        world.submit(submission(f"s{i}", list(range(3 + 5 * i)), 150))
    engine.leases.set_free_pages(256, 8)
    rounds = commits = extends = 0
    while engine.is_busy:
        world.run_round()
        is_steady = len(engine.table.scheduled) == 8 and all(s.phase is Phase.DECODING for s in engine.table.scheduled)
        rounds += is_steady
        commits += is_steady and any(isinstance(frame, Commit) for frame in engine.leases.frames)
        extends += is_steady and any(isinstance(frame, Extend) for frame in engine.leases.frames)
        for s in engine.table.scheduled:
            assert s.run.computed - (s.run.committed // 16 + 1) * 16 < PACING.commit_delay_tokens
        world.exchange_with_kv()
        world.compute_step()
    assert rounds > 100
    assert 3 <= commits <= 2 + rounds / PACING.commit_delay_tokens
    assert 2 <= extends <= 2 + rounds / (engine.leases.stride * engine.leases.page_tokens // 2)
    world.run_until_idle()
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
def test_number_of_unacknowledged_steps(streams: int, step_us: float, at_most: int) -> None:
    """With more streams the scheduler is woken less often."""
    world = World(batch=24, pages=256)
    engine = world.engine
    world.set_cost(step_us, 1.0, 0.001, is_fixed=True)
    for i in range(streams):
        world.submit(submission(f"s{i}", [1, 2, 3 + i], 60))
    for _ in range(3 + streams):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    most = 0
    for _ in range(20):
        world.run_round()
        most = max(most, len(engine.steps.unacknowledged))
        world.compute_step()
    assert most == at_most
    world.run_until_idle()
    world.check_all()


def test_the_scheduler_is_woken_for_the_last_token_of_a_stream():
    world = World(batch=4)
    world.submit(submission("a", [1, 2, 3], 6))
    world.submit(submission("b", [4, 5], 60))
    last = 0
    while "a" not in world.ends:
        world.run_round()
        world.exchange_with_kv()
        for step in world.engine.steps.unacknowledged:
            if any(e.sequence.id == "a" and e.start == 3 + 6 - 2 for e in step.entries):
                last = step.number
        if last:
            assert world.engine.steps.wake_step <= last
        world.compute_step()
        world.run_round()
        world.collect()
    assert last
    world.run_until_idle()
    world.check_all()


def test_steps_run_ahead_only_while_no_draft_tokens_are_found():
    world = World(speculate=4, period=3, batch=1)  # the output repeats itself
    world.submit(submission("a", [1, 2, 3], 200))
    engine = world.engine
    ahead = []
    while "a" not in world.ends:
        world.run_round()
        world.exchange_with_kv()
        ahead.append((bool(engine.stats.drafted), len(engine.steps.unacknowledged)))
        world.compute_step()
        world.run_round()
        world.collect()
    assert max(n for is_drafting, n in ahead if not is_drafting) == PACING.max_depth
    assert engine.stats.accepted > 100
    assert all(n <= 2 for is_drafting, n in ahead[-20:])
    world.run_until_idle()
    world.check_all()


def test_the_next_step_is_published_earlier_if_the_worker_had_to_wait():
    world = World(batch=2, context=400)
    world.submit(submission("a", [1, 2, 3], 300))
    engine = world.engine
    for _ in range(4):
        world.run_round()
        world.exchange_with_kv()
    leads = []
    for _ in range(8):
        world.set_cost(40_000.0, 1.0, 0.001, is_fixed=True)  # it expects 40 ms of every step
        while len(engine.steps.unacknowledged) > 1:
            world.compute_step()
            world.run_round()
        assert len(engine.steps.unacknowledged) == 1, "the next step waits for the end of the current one"
        engine.steps.unacknowledged[0].expected_s = 0.04
        world.run_round()
        leads.append(engine.steps.lead.seconds)
        world.now += 0.02  # the step ends earlier than expected
        if engine.steps.publish_wait_s(world.now) > 0:
            world.compute_step()
        world.run_round()
    assert leads[:4] == pytest.approx(
        [PACING.min_lead_s, 2 * PACING.min_lead_s, 4 * PACING.min_lead_s, 8 * PACING.min_lead_s], rel=0.05
    )
    assert max(leads) < 8.1 * PACING.min_lead_s, "a lead of 24 ms is enough"
    world.set_cost(40_000.0, 1.0, 0.001)  # from here on it learns that they take less
    world.run_until_idle()
    assert world.tokens["a"] == reference(submission("a", [1, 2, 3], 300))[0]
    assert engine.steps.lead.seconds == pytest.approx(PACING.min_lead_s, rel=1.0), "the lead shrinks again"


def stream(world: World, frames: list[Submit]) -> None:
    """Submit sequences and run until each has two tokens. A step is expected to take 60 ms."""
    engine = world.engine
    world.set_cost(60_000.0, 1.0, 0.001, is_fixed=True)
    for frame in frames:
        world.submit(frame)
    while len(engine.table.live) < len(frames) or any(s.outputs < 2 for s in engine.table.live.values()):
        world.run_round()
        world.exchange_with_kv()
        world.now += max(group.steps.publish_wait_s(world.now) for group in engine.groups)
        world.run_round()
        world.compute_step()
    world.run_round()


def entries_after_arrival(world: World, frame: Submit) -> set[str]:
    """Submit a sequence during a step. Returns the sequences of the step behind it."""
    engine = world.engine
    world.submit(frame)
    world.run_round()
    world.exchange_with_kv()
    world.run_round()
    world.now += engine.steps.publish_wait_s(world.now)
    world.run_round()
    _, behind = engine.steps.unacknowledged
    return {entry.sequence.id for entry in behind.entries}


@pytest.mark.parametrize("streams", [3, 4])
def test_a_long_step_is_published_early_if_the_batch_is_full(streams: int) -> None:
    """Places are free in a batch of 4 with three streams; and with four behind the last token of one of them."""
    world = World(batch=4, pages=128)
    engine = world.engine
    stream(world, [submission(f"s{i}", [1, 2, 3 + i], 20 if i else 12) for i in range(streams)])
    seen = set()
    while "s0" not in world.ends:
        world.run_round()
        world.collect()
        assert engine.steps.unacknowledged
        first = engine.steps.unacknowledged[0]
        ends = any(entry.sequence.id == "s0" and entry.start + entry.count == 3 + 12 - 1 for entry in first.entries)
        is_early = len(engine.steps.unacknowledged) == 2
        if len(first.entries) == streams:
            assert is_early == (streams == 4 and not ends), (first.number, ends)
            seen.add((is_early, ends))
        if not is_early:  # it is published before the current step ends all the same
            world.now += engine.steps.publish_wait_s(world.now)
            world.run_round()
            assert len(engine.steps.unacknowledged) == 2
        world.compute_step()
        world.run_round()
        world.collect()
    assert seen == ({(True, False), (False, True)} if streams == 4 else {(False, False), (False, True)})
    world.run_until_idle()
    world.check_all()


@pytest.mark.parametrize("cause", ["stop id", "cancel"])
def test_a_request_that_arrives_takes_the_place_of_a_stream_that_has_ended_in_the_next_step(cause: str) -> None:
    """The step that computes when the stream ends was published with it."""
    world = World(batch=4, pages=128)
    engine = world.engine
    frames = [submission(f"s{i}", [1, 2, 3 + i], 30) for i in range(4)]
    if cause == "stop id":
        output = reference(frames[0])[0]
        assert output[8] not in output[:8]
        frames[0] = submission("s0", [1, 2, 3], 30, stop_ids=(output[8],))
    stream(world, frames)
    while "s0" in engine.table.live:
        assert len(engine.steps.unacknowledged) == 2, "the batch is full"
        if cause == "cancel" and engine.table.live["s0"].outputs == 8:
            world.cancel("s0")
        world.compute_step()
        world.run_round()
    world.collect()
    assert world.ends == {"s0": "stop" if cause == "stop id" else "cancelled"}
    assert [entry.sequence.id for entry in engine.steps.unacknowledged[0].entries] == ["s0", "s1", "s2", "s3"]
    assert entries_after_arrival(world, submission("late", [7, 8], 4)) == {"s1", "s2", "s3", "late"}
    world.run_until_idle()
    world.check_all()


def test_a_request_of_one_of_two_tenants_joins_the_next_step_of_a_full_batch() -> None:
    """Its tenant has had less, and the other one's youngest stream makes room."""
    world = World(batch=4, pages=128)
    stream(world, [submission(f"s{i}", [1, 2, 3 + i], 30, tenant="few" if i == 3 else "many") for i in range(4)])
    assert entries_after_arrival(world, submission("late", [7, 8], 4, tenant="few")) == {"s0", "s1", "s3", "late"}
    world.run_until_idle()
    world.check_all()


def test_no_step_is_published_early_where_other_models_may_want_the_cores() -> None:
    world = World(batch=4, pages=128)
    steps = world.engine.steps
    steps.is_alone = False
    stream(world, [submission(f"s{i}", [1, 2, 3 + i], 20) for i in range(4)])
    assert len(steps.unacknowledged) == 1
    assert steps.publish_wait_s(world.now) > 0
    steps.is_alone = True
    assert world.run_round() == 1
    world.run_until_idle()
    world.check_all()


def test_no_step_is_published_early_while_places_are_free_and_pages_are_short() -> None:
    """Pages may be free again before the step ends."""
    world = World(batch=4, pages=128)
    stream(world, [submission(f"s{i}", [1, 2, 3 + i], 20) for i in range(3)])
    steps = world.engine.steps
    world.engine.pages.is_short = True
    assert steps.publish_wait_s(world.now) > 0
    assert world.run_round() == 0
    world.engine.pages.is_short = False
    world.run_until_idle()
    world.check_all()
