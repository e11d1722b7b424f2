"""Scored prompts: every token's score once, in order, whatever chunks, caches, neighbours, deaths and preemptions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shm.step_ring import MAX_TOP, SLOTS
from stages.scheduler.core.prompt_scores import PromptScores
from stages.scheduler.policy.admission import check_frame

from .peers import Submit, submission
from .world import World

EVENTS = ("worker", "half", "kv", "lost lease", "step", "round")


def scored(name: str, prompt: list[int], max_tokens: int = 3, top: int = 2, **fields) -> Submit:
    """A prompt whose tokens are scored."""
    return submission(name, prompt, max_tokens, prompt_logprobs=top, **fields)


@given(st.integers(1, 200), st.integers(1, 210), st.integers(0, 210), st.integers(1, 80), st.integers(1, 40))
def test_parts_cover_each_token_once_whatever_the_chunks(n_tokens: int, done: int, cached: int, spare: int, size: int):
    scores = PromptScores(0, n_tokens, done)
    found = list(range(1, min(done, n_tokens)))
    start = min(cached, scores.sharable, n_tokens - 1)
    while start < n_tokens:
        count = min(size, n_tokens - start, scores.longest(start, spare))
        first, n = scores.part(start, count)
        assert 0 <= n <= spare
        assert start <= first
        assert n == 0 or first + n == min(start + count, n_tokens - 1)  # they are the last ones before a sample
        found += range(first + 1, first + 1 + n)
        scores.scored = max(scores.scored, first + 1 + n)
        start += count
    assert found == list(range(1, n_tokens))
    assert scores.is_complete


def test_scores_in_one_step_and_in_many():
    prompts = [[3], [4, 5], [4] * 16, list(range(1, 90)), [7] * 200]
    for step_tokens in (16, 48, 512):
        for max_tokens in (0, 1, 4):
            world = World(max_step_tokens=step_tokens)
            for i, prompt in enumerate(prompts):
                world.submit(scored(f"p{i}", prompt, max_tokens, top=i))
                world.submit(submission(f"s{i}", prompt, 5, seed=i))
            world.run_until_idle()
            world.check_all()
            assert set(world.ends.values()) == {"length"}


@given(
    st.lists(st.sampled_from(EVENTS), max_size=40),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 150), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(18, 64),
)
def test_deaths_and_preemptions_change_no_score_and_no_token(events, prompts, pages):
    world = World(pages=pages, max_step_tokens=64)
    for i, (max_tokens, n, top) in enumerate(prompts):
        world.submit(scored(f"p{i}", [1 + i] * n, max_tokens, top, seed=i))
        world.submit(submission(f"s{i}", [1 + i] * n, 9, seed=i))
    for event in events:
        world.strike(event)
    world.run_until_idle()
    world.check_all()
    assert set(world.ends.values()) <= {"length", "error"}
    assert all(world.errors[name] == "INFERENCE" for name, end in world.ends.items() if end == "error")


def test_a_cached_prefix_is_computed_again_and_what_is_scored_is_not():
    world = World()
    prompt = list(range(1, 100))
    world.submit(submission("before", prompt, 2))
    world.run_until_idle()
    computed = world.engine.stats.prompt_computed
    world.submit(scored("all", prompt))
    world.run_until_idle()
    assert world.engine.stats.prompt_computed == computed + len(prompt)
    computed = world.engine.stats.prompt_computed
    world.submit(scored("rest", prompt, scored=70))
    world.run_until_idle()
    assert world.engine.stats.prompt_computed == computed + len(prompt) - 64
    computed = world.engine.stats.prompt_computed
    world.submit(scored("none", prompt, scored=99))
    world.submit(scored("nothing", prompt, 0, scored=99))
    world.run_until_idle()
    assert world.engine.stats.prompt_computed == computed + len(prompt) - 96
    world.check_all()


def test_a_live_sequence_is_not_taken_over_without_the_scores_that_were_sent():
    world = World(max_step_tokens=16)
    frame = scored("a", list(range(1, 60)), 3)
    world.submit(frame)
    for _ in range(3):
        world.run_round()
        world.exchange_with_kv()
        world.compute_step()
    world.run_round()
    assert world.engine.outbox.tokens
    world.engine.outbox.tokens.clear()  # the gateway dies with them
    world.submit(frame)
    world.run_until_idle()
    world.check_all()


def test_scores_that_are_not_finite_end_the_request():
    world = World()
    world.submit(scored("a", [3] * 20))
    while not world.compute_step():
        world.run_round()
        world.exchange_with_kv()
    world.steps.out_token[int(world.ring.done) % SLOTS, 4] = -1
    world.run_until_idle()
    assert (world.ends["a"], world.errors["a"]) == ("error", "INFERENCE")


def test_frames_that_cannot_be_scored_are_refused():
    assert check_frame(scored("a", [1, 2], top=MAX_TOP)) is None
    assert check_frame(scored("a", [1, 2], top=MAX_TOP + 1)).param == "prompt_logprobs"
    assert check_frame(scored("a", [1, 2], forced=[4])).param == "forced"
    assert check_frame(scored("a", [1, 2], forced=[4], scored=2)) is None
    assert check_frame(submission("a", [1], -1)).param == "max_tokens"
