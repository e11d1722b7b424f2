"""Who is refused at the door: only whom a bound or the clock gives no chance."""

from __future__ import annotations

import msgspec
import pytest

from stages.scheduler.core.row_scheduler import PREFETCH

from .peers import submission
from .world import GATEWAY, World


def learned(world: World, steps: int = 40) -> None:
    """So many steps have run, so that what waits can be told in seconds."""
    world.submit(submission("first", [1, 2, 3], steps))
    world.settle()
    assert world.engine.stats.steps > 32
    world.collect()


@pytest.mark.parametrize("deadline_ms", [1, 200, 999, 1000])
def test_an_idle_model_refuses_nobody_for_a_short_time(deadline_ms: int) -> None:
    world = World()
    learned(world)
    world.submit(submission("short", [1, 2, 3], 4, deadline_ms=deadline_ms))
    assert "short" in world.engine.table.live
    world.settle()
    world.check_all()


def test_who_would_wait_beyond_its_time_is_refused_with_the_time_to_come_back() -> None:
    world = World(max_queue_depth=1000)
    learned(world)
    world.set_cost(4000.0, 1.0, 0.001)  # a second for about 1000 tokens of 4 at once
    for i in range(100):
        world.submit(submission(f"s{i}", [1, 2, 3], 50))
    wait_s = world.engine.waits.backlog_s(world.engine.queues.tenant("t"))
    assert wait_s > 2.0
    run_s = 0.004 * 50
    world.submit(submission("patient", [1, 2, 3], 50, deadline_ms=round(1000 * (wait_s + 1.1 * run_s))))
    world.submit(submission("hasty", [1, 2, 3], 50, deadline_ms=round(1000 * (wait_s + 0.9 * run_s))))
    assert "patient" in world.engine.table.live
    ((owner, refused),) = world.engine.outbox.rejected
    assert (owner, refused.sequence, refused.code) == (GATEWAY, "hasty", "OVERLOADED")
    assert wait_s <= refused.retry_after_s <= wait_s + 1.2


def test_who_can_begin_at_once_is_not_refused_for_what_others_took() -> None:
    world = World()
    learned(world, 390)
    world.set_cost(4000.0, 1.0, 0.001)
    world.engine.stats.mean_output = 390.0  # which take more than a second
    world.submit(submission("short", [1, 2, 3], 390, deadline_ms=1000))
    assert "short" in world.engine.table.live


@pytest.mark.parametrize("company_s", [0.0, 0.5])
@pytest.mark.parametrize("depth", [1, 3])
def test_who_arrives_together_at_an_idle_model_waits_for_no_place(depth: int, company_s: float) -> None:
    batch = 4
    world = World(batch=batch, max_queue_depth=depth, batch_timeout_s=company_s)
    fit = batch + PREFETCH + depth
    for i in range(fit + 3):  # before the engine has a turn
        world.submit(submission(f"s{i}", [i + 1, 2, 3], 20))
    assert [rejected.sequence for _, rejected in world.engine.outbox.rejected] == [f"s{fit + i}" for i in range(3)]
    assert world.engine.queues.depth == depth
    world.settle()
    world.check_all()
    assert list(world.ends.values()).count("length") == fit


def test_steps_that_follow_each_other_slowly_count_as_they_are() -> None:
    """What lies between two steps (other models' steps, everything that is no computing) is part of the wait."""

    def backlog_s(pause_s: float) -> float:
        world = World(max_queue_depth=1000)
        world.set_cost(1000.0, 1.0, 0.001)
        world.submit(submission("s", [1, 2, 3], 300))
        while world.engine.is_busy:
            world.run_round()
            world.talk_to_kv()
            while world.work():
                world.now += 0.001 + pause_s
                world.run_round()
            world.collect()
        for i in range(100):
            world.submit(submission(f"s{i}", [1, 2, 3], 50))
        return world.engine.waits.backlog_s(world.engine.queues.tenant("t"))

    assert backlog_s(0.004) > 3 * backlog_s(0.0)


def test_answers_that_their_time_cut_off_count_with_what_they_had() -> None:
    world = World(batch=4)
    for round_ in range(12):
        for i in range(4):
            world.submit(submission(f"s{round_}.{i}", [i + 1, 2, 3], 390, deadline_ms=1000))
        while any(s.outputs < 100 for s in world.engine.table.live.values()):
            world.run_round()
            world.talk_to_kv()
            world.work()
        world.advance(1.5)
        world.settle()
    assert set(world.ends.values()) == {"timeout"}
    assert world.engine.stats.mean_output > 90


def test_the_door_tells_whole_seconds_of_at_least_one() -> None:
    world = World()
    tenant = world.engine.queues.tenant("t")
    assert world.engine.waits.backlog_s(tenant) < 1.0
    assert world.engine.waits.retry_after_s(tenant) == 1.0


def test_attention_over_long_answers_is_part_of_the_wait() -> None:
    """Where it takes most of a step, what is read once for all tokens says next to nothing."""

    def backlog_s(position_us: float) -> float:
        world = World(max_queue_depth=1000)
        world.set_cost(1000.0, 1.0, position_us)
        world.engine.stats.mean_output = 300.0
        for i in range(100):
            world.submit(submission(f"s{i}", [1, 2, 3], 300))
        return world.engine.waits.backlog_s(world.engine.queues.tenant("t"))

    # A step of 4 at half of their length looks at 600 positions.
    assert backlog_s(5.0) == pytest.approx(4 * backlog_s(0.0001), rel=0.1)


def test_what_the_cache_has_of_prompts_takes_no_time() -> None:
    def backlog_s(others: int) -> float:
        world = World(max_queue_depth=1000, pages=256)
        for i in range(100):
            world.submit(submission(f"s{i}", [others and i] * 64 + [7] * 96 + [i], 2))
            world.settle()
        world.set_cost(1.0, 100.0, 0.0001)
        for i in range(100):
            world.submit(submission(f"t{i}", [others and i] * 64 + [7] * 96 + [i], 2))
        return world.engine.waits.backlog_s(world.engine.queues.tenant("t"))

    assert backlog_s(0) < 0.5 * backlog_s(1)


@pytest.mark.parametrize(
    ("waiting", "out"), [((("p", 0), ("r", 2)), "p/0"), ((("r", 2), ("p", 0)), "p/0"), ((("r", 2), ("x", 1)), "x/1")]
)
def test_room_is_made_by_a_request_that_has_not_begun(waiting: tuple[tuple[str, int], ...], out: str) -> None:
    """One that is put out fails with all its texts: rather one of which nothing has been sent, else the newest."""
    world = World(batch=1, max_queue_depth=2)
    for request, choice in (("r", 0), ("r", 1), ("x", 0), *waiting):
        frame = submission(f"{request}/{choice}", [1, 2, 3], 20, choice=choice)
        world.submit(msgspec.structs.replace(frame, request=request))
    world.run_round()
    assert world.engine.queues.depth == 2
    world.submit(submission("quiet", [1, 2, 3], 20, tenant="quiet"))
    assert [rejected.sequence for _, rejected in world.engine.outbox.rejected] == [out]


@pytest.mark.parametrize(("asked", "most"), [(0, 4), (-1, 0), (2, 2)])
def test_a_request_leaves_speculation_as_configured_or_switches_it_off(asked: int, most: int) -> None:
    world = World(speculate=4)
    world.submit(submission("s", [1, 2, 3], 4, speculate=asked))
    assert world.engine.table.live["s"].max_draft_tokens == most
