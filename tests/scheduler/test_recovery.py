"""Deaths of the worker, restarts of kv, and gateways that come back."""

from __future__ import annotations

import pytest

from pipeline.protocol.messages import Denied
from stages.scheduler.core.sequence_table import REATTACH_S

from .peers import reference, submission
from .world import GATEWAY, World


def test_a_poisoned_sequence_ends_with_an_error_and_the_others_with_their_tokens():
    world = World(batch=8)
    world.worker.poison = {100}
    for i in range(6):
        world.submit(submission(f"s{i}", [10 + i] * 20 + ([100] if i == 3 else []) + [7], 30, seed=i))
    world.run_until_idle()
    assert world.ends.pop("s3") == "error"
    assert world.errors["s3"] == "INFERENCE"
    assert set(world.ends.values()) == {"length"}
    for name in world.ends:
        assert world.tokens[name] == reference(world.submitted[name])[0]
    assert world.engine.stats.culprits == 1


def test_repeated_deaths_of_the_worker_end_no_sequence_that_advances():
    world = World(batch=4)
    for i in range(4):
        world.submit(submission(f"s{i}", [i + 1] * 30, 40, seed=i))
    for _ in range(30):
        world.run_round()
        world.exchange_with_kv()
        world.run_round()
        world.compute_step()
        world.run_round()
        world.kill_worker()
    world.run_until_idle()
    world.check_all()
    assert set(world.ends.values()) == {"length"}


def test_other_contents_of_the_kv_arena_restart_all_sequences():
    world = World(batch=4)
    for i in range(6):
        world.submit(submission(f"s{i}", [i + 1] * 30, 40, seed=i))
    for _ in range(20):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.collect()
    # kv restarts with an arena of another generation: no page of the old one may be used.
    world.engine.kv_down()
    world.to_kv.clear()
    world.kv.fresh()
    world.kv.generation += 1
    assert world.engine.kv_ready(world.kv.ready())
    world.engine.halt(world.now)
    while world.compute_step():  # the worker still has the old arena mapped
        pass
    world.pages.states[:] = -1
    world.engine.detached(world.now)
    world.attach()
    world.run_until_idle()
    world.check_all()
    assert set(world.ends.values()) == {"length"}


def test_a_lease_that_kv_does_not_recognise_is_acquired_again():
    world = World(batch=4)
    for i in range(3):
        world.submit(submission(f"s{i}", [i + 1] * 30, 40, seed=i))
    for _ in range(10):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.engine.pages.denied(Denied(0, "s1", True, 0, 0, 0))
    world.run_until_idle()
    world.check_all()
    assert set(world.ends.values()) == {"length"}


@pytest.mark.parametrize("half_way", [False, True])
def test_a_verification_is_repeated_after_the_worker_died_in_it(half_way):
    world = World(period=10, speculate=8, batch=2)
    for i in range(2):
        world.submit(submission(f"s{i}", [20 * i + k for k in range(1, 11)], 150, seed=i))
    deaths = 0
    for _ in range(2000):
        world.run_round()
        world.exchange_with_kv()
        if any(step.is_verifying for step in world.engine.steps.unacknowledged) and deaths < 40:
            deaths += 1
            world.kill_worker(half_way)
            world.run_round()
        world.compute_step()
        world.run_round()
        world.collect()
        if not world.engine.is_busy:
            break
    world.check_all()
    assert deaths > 10
    assert set(world.ends.values()) == {"length"}


def test_a_sequence_that_is_submitted_again_continues_from_its_known_tokens():
    world = World()
    frame = submission("a", [1, 2, 3], 60)
    world.submit(frame)
    for _ in range(30):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.collect()
    got = list(world.tokens["a"])
    world.engine.table.detach_gateway(GATEWAY, world.now)
    for _ in range(10):
        world.run_round()
        world.compute_step()
    assert not world.engine.outbox.tokens
    computed = world.engine.stats.prompt_computed
    world.engine.submissions.submit(GATEWAY, submission("a", [1, 2, 3], 60, forced=got), world.now)
    world.run_until_idle()
    assert world.tokens["a"] == reference(frame)[0]
    assert world.engine.stats.prompt_computed == computed, "no position was computed again"


def test_a_sequence_without_gateway_is_cancelled_after_a_while():
    world = World()
    world.submit(submission("a", [1, 2, 3], 300))
    world.run_round()
    world.exchange_with_kv()
    world.engine.table.detach_gateway(GATEWAY, world.now)
    world.advance(11.0)
    world.run_until_idle()
    assert world.ends == {}
    assert not world.engine.table.live


def test_the_time_to_submit_again_begins_with_the_last_disconnection() -> None:
    world = World()
    world.submit(submission("s", [1, 2, 3], 50))
    world.run_round()
    world.engine.table.detach_gateway(GATEWAY, world.now)
    world.advance(0.9 * REATTACH_S)
    world.submit(world.submitted["s"])
    world.engine.table.detach_gateway(GATEWAY, world.now)
    world.advance(0.9 * REATTACH_S)
    assert "s" in world.engine.table.live
    world.advance(0.2 * REATTACH_S)
    assert "s" not in world.engine.table.live
