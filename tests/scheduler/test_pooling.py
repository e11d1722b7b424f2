"""Pooled prompts: the vector of an undisturbed run, whatever steps, neighbours, deaths and preemptions; no cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.messages import POOLINGS
from shm.step_ring import MAX_POOLED
from stages.scheduler.core.pooled_prompt import PooledPrompt

from .peers import Submit, reference_vector, submission
from .world import GATEWAY, World

EVENTS = ("worker", "half", "kv", "lost lease", "step", "round")


def pooled(name: str, prompt: list[int], pooling: str = "mean", **fields) -> Submit:
    """A prompt whose hidden states are wanted."""
    return submission(name, prompt, 1, pooling=pooling, **fields)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_in_one_step_and_in_many(pooling: str):
    prompts = [[3], [4] * 16, list(range(1, 90)), [7] * 200]
    for step_tokens in (16, 48, 512):
        world = World(max_step_tokens=step_tokens)
        for i, prompt in enumerate(prompts):
            world.submit(pooled(f"p{i}", prompt, pooling))
        world.run_until_idle()
        world.check_all()
        assert set(world.ends.values()) == {"pooled"}
        assert len(world.vectors) == len(prompts)
        assert world.engine.stats.generated == 0


@given(
    st.lists(st.sampled_from(EVENTS), max_size=40),
    st.lists(st.tuples(st.sampled_from(POOLINGS), st.integers(1, 150)), min_size=1, max_size=12),
    st.integers(18, 64),
)
def test_deaths_and_preemptions_change_no_vector_and_no_token(events, prompts, pages):
    world = World(pages=pages, max_step_tokens=64)
    for i, (pooling, n) in enumerate(prompts):
        world.submit(pooled(f"p{i}", [1 + i] * n, pooling))
        world.submit(submission(f"s{i}", [1 + i] * n, 9, seed=i))
    for event in events:
        world.strike(event)
    world.run_until_idle()
    world.check_all()
    assert {end for name, end in world.ends.items() if name.startswith("p")} <= {"pooled", "error"}
    assert all(world.errors[name] == "INFERENCE" for name, end in world.ends.items() if end == "error")


@given(
    st.lists(st.sampled_from(EVENTS), max_size=40),
    st.lists(st.tuples(st.sampled_from(POOLINGS), st.integers(1, 64)), min_size=1, max_size=12),
    st.integers(5, 64),
)
def test_prompts_of_a_model_that_is_not_causal_are_computed_in_one_step(events, prompts, pages):
    world = World(pages=pages, max_step_tokens=64, is_causal=False)
    world.worker.whole = {1 + i: n for i, (_, n) in enumerate(prompts)}  # the worker compares
    for i, (pooling, n) in enumerate(prompts):
        world.submit(pooled(f"p{i}", [1 + i] * n, pooling))
    for event in events:
        world.strike(event)
    world.run_until_idle()
    world.check_all()
    assert len(world.ends) == len(prompts)
    assert set(world.ends.values()) <= {"pooled", "error"}


def test_a_model_that_is_not_causal_refuses_text_and_longer_prompts():
    world = World(max_step_tokens=64, is_causal=False)
    world.submit(submission("text", [1], 4))
    world.submit(pooled("long", [2] * 65))
    world.run_until_idle()
    assert world.ends == {"text": "rejected", "long": "rejected"}
    assert world.errors == {"text": "INVALID_REQUEST", "long": "CONTEXT_LENGTH_EXCEEDED"}


def test_pooled_prompts_use_and_fill_no_cache():
    world = World()
    prompt = list(range(1, 80))
    world.submit(submission("before", prompt, 2))
    world.run_until_idle()
    cached = dict(world.kv.index)
    for name in ("a", "b"):
        world.submit(pooled(name, prompt))
        world.submit(pooled(name * 2, [9] * 70))
        world.run_until_idle()
        assert dict(world.kv.index) == cached
    world.check_all()
    assert world.vectors["a"] == world.vectors["b"]


def test_a_step_has_no_more_pooled_entries_than_places():
    world = World(batch=3 * MAX_POOLED, pages=512)
    for i in range(3 * MAX_POOLED):
        world.submit(pooled(f"p{i}", [1 + i] * (1 + i % 2), ("mean", "last")[i % 2]))
    world.run_until_idle()
    world.check_all()
    assert len(world.vectors) == 3 * MAX_POOLED
    assert max(world.worker.in_batch) == MAX_POOLED


def test_the_whole_context_can_be_pooled_and_no_more():
    world = World(context=400, pages=64)
    world.submit(pooled("fits", [5] * 400))
    world.submit(pooled("long", [5] * 401))
    world.run_until_idle()
    assert world.ends == {"fits": "pooled", "long": "rejected"}
    assert world.errors["long"] == "CONTEXT_LENGTH_EXCEEDED"
    assert world.vectors["fits"] == reference_vector(world.submitted["fits"])


def test_a_cancelled_prompt_returns_its_pages_and_a_repeated_one_goes_on():
    world = World(max_step_tokens=16)
    world.submit(pooled("gone", [5] * 200))
    world.submit(pooled("again", [6] * 200))
    for _ in range(16):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.cancel("gone")
    steps = world.engine.stats.steps
    world.engine.table.detach_gateway(GATEWAY, world.now)
    world.submit(pooled("again", [6] * 200))
    assert world.engine.table.live["again"].run.computed > 0
    world.submit(pooled("again", [6] * 200, "last"))  # of another kind: computed from its start
    assert world.engine.table.live["again"].run.computed == 0
    world.submitted["again"] = pooled("again", [6] * 200, "last")
    world.ends.pop("again", None)
    world.run_until_idle()
    assert world.engine.stats.steps > steps
    assert world.vectors == {"again": reference_vector(world.submitted["again"])}


@pytest.mark.parametrize("fields", [{"pooling": "sum"}, {"pooling": "mean", "forced": [1]}])
def test_a_bad_submission_is_refused(fields: dict):
    world = World()
    world.engine.submissions.submit(GATEWAY, submission("x", [1], 1, **fields), 0.0)
    assert [frame.code for _, frame in world.engine.outbox.rejected] == ["INVALID_REQUEST"]


def test_states_that_are_not_finite_end_the_prompt_alone():
    world = World()
    world.submit(pooled("bad", [5] * 30))
    world.submit(pooled("good", [6] * 30))
    compute = world.worker._pool

    def spoiled(slot, row, first, n, place, left):
        compute(slot, row, first, n, place, left)
        if world.steps.tokens[row, 0] == 5:
            world.steps.pool_states[slot, place] = -1

    world.worker._pool = spoiled
    world.run_until_idle()
    assert world.ends == {"bad": "error", "good": "pooled"}
    assert world.errors["bad"] == "INFERENCE"


@given(st.sampled_from(POOLINGS), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_parts_cover_what_a_kind_pools(kind: str, chunks: list[int]):
    n = sum(chunks)
    prompt, start, positions = PooledPrompt(kind, n), 0, []
    for count in chunks:
        first, pooled_positions = prompt.part(start, count)
        positions += range(start + first, start + first + pooled_positions)
        start += count
    assert positions == {"mean": list(range(n)), "last": [n - 1], "cls": [0], "rank": [0]}[kind]
