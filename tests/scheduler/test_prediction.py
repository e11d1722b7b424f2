"""A predicted text saves steps where it is right, and changes no token, whatever it says and whatever dies."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from pipeline.config.schema import MAX_DRAFT_TOKENS

from .peers import VOCAB, reference, submission
from .world import World

PROMPT = [7, 8, 9, 10]
N = 200


def predicted(tokens: list[int], **fields: int) -> World:
    world = World(**fields)
    world.submit(submission("a", PROMPT, N, seed=3, prediction=array("i", tokens).tobytes()))
    return world


def exact() -> list[int]:
    return reference(submission("a", PROMPT, N, seed=3))[0]


def test_an_exact_prediction_takes_a_fraction_of_the_steps() -> None:
    world = predicted(exact())
    world.run_until_idle()
    world.check_all()
    assert world.engine.stats.steps < N / 8
    assert world.engine.stats.accepted > 0.9 * N


def test_a_changed_prediction_is_followed_again_after_each_change() -> None:
    tokens = exact()
    for at in (20, 90, 150):
        tokens[at : at + 1] = [99, 98]
    world = predicted(tokens)
    world.run_until_idle()
    world.check_all()
    assert world.engine.stats.steps < N / 3


def test_a_wrong_prediction_costs_next_to_nothing() -> None:
    world = predicted([VOCAB - 1] * N)
    world.run_until_idle()
    world.check_all()
    assert world.engine.stats.drafted < 20
    assert world.engine.stats.steps < 1.1 * N


def test_deaths_change_no_token() -> None:
    world = predicted(exact())
    for _ in range(6):
        world.run_round()
        world.exchange_with_kv()
        world.run_round()
        world.compute_step()
        world.run_round()
        world.kill_worker(half_way=True)
        world.restart_kv()
        world.collect()
    world.run_until_idle()
    world.check_all()


def test_a_new_scheduler_continues_within_the_prediction() -> None:
    """As after its death: the tokens so far are forced."""
    tokens = exact()
    world = World()
    frame = submission("a", PROMPT, N, seed=3, forced=tokens[:100], prediction=array("i", tokens).tobytes())
    world.submit(frame)
    world.run_until_idle()
    world.check_all()
    assert world.engine.stats.steps < 12


@pytest.mark.parametrize(
    ("asked", "configured", "most"), [(0, 0, MAX_DRAFT_TOKENS), (3, 0, 3), (-1, 4, 0), (0, 4, MAX_DRAFT_TOKENS)]
)
def test_a_prediction_switches_speculation_on(asked: int, configured: int, most: int) -> None:
    world = World(speculate=configured)
    world.submit(submission("s", [1, 2, 3], 4, speculate=asked, prediction=array("i", [1]).tobytes()))
    assert world.engine.table.live["s"].max_draft_tokens == most


@pytest.mark.parametrize("prediction", [b"123", array("i", [VOCAB]).tobytes(), array("i", [-1]).tobytes()])
def test_a_prediction_that_is_none_is_refused(prediction: bytes) -> None:
    world = World()
    frame = msgspec.structs.replace(submission("s", [1, 2, 3], 4), prediction=prediction)
    world.submit(frame)
    (rejected,) = [frame for _, frame in world.engine.outbox.rejected]
    assert (rejected.code, rejected.param) == ("INVALID_REQUEST", "prediction")
