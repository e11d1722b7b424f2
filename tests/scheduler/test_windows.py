"""Models whose layers all have a sliding window: no page behind it is held, and no answer changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm.pages import KV_SPLIT, first_read

from .peers import submission
from .windowed import CONTEXT, PAGE_TOKENS, windowed
from .world import World


def bound(world: World) -> int:
    """The most pages of one sequence."""
    return world.engine.leases.most_pages(CONTEXT)


def test_a_long_sequence_holds_the_pages_of_its_window() -> None:
    world = windowed(pages=64)
    assert bound(world) < 40 < CONTEXT // PAGE_TOKENS
    world.submit(submission("s", [1 + i % 90 for i in range(900)], 400, seed=3))
    most = 0
    while world.engine.is_busy:
        world.run_round()
        world.exchange_with_kv()
        most = max(most, world.kv.manager.pool.leased)  # type: ignore[attr-defined]
        world.compute_step()
        world.collect()
    world.exchange_with_kv()
    world.check_all()
    assert world.ends == {"s": "length"}
    assert KV_SPLIT // PAGE_TOKENS <= most <= bound(world)


def test_a_sequence_longer_than_the_arena_is_admitted_and_one_without_window_is_not() -> None:
    world = windowed(pages=40)
    world.submit(submission("s", [1 + i % 90 for i in range(900)], 400, seed=3))
    world.run_until_idle()
    world.check_all()
    assert world.ends == {"s": "length"}
    plain = World(pages=40, page_tokens=PAGE_TOKENS, context=CONTEXT)
    plain.submit(submission("s", [1 + i % 90 for i in range(900)], 400, seed=3))
    plain.run_until_idle()
    assert plain.errors["s"] == "INSUFFICIENT_RESOURCES"


def test_a_continued_text_shares_its_window_though_the_pages_before_it_are_evicted() -> None:
    world = windowed(pages=44)
    prompt = [1 + i % 90 for i in range(900)]
    world.submit(submission("first", prompt, 100, seed=3))
    world.run_until_idle()
    world.submit(submission("second", prompt + world.tokens["first"] + [7] * 20, 50, seed=4))
    world.run_round()
    world.exchange_with_kv()
    world.run_round()
    [sequence] = world.engine.table.scheduled
    assert sequence.cached_tokens == 999 // PAGE_TOKENS * PAGE_TOKENS
    assert sequence.run.pages[0] == -1
    world.run_until_idle()
    world.check_all()
    # A text that leaves the first one before its window finds nothing: the pages there are gone.
    world.submit(submission("third", [*prompt[:200], 9, 9, 9], 10, seed=4))
    world.run_until_idle()
    world.check_all()
    assert world.ends == dict.fromkeys(("first", "second", "third"), "length")


def test_pooled_prompts_and_scored_ones_release_pages_too() -> None:
    world = windowed(pages=40)
    world.submit(submission("pooled", [3] * 1000, 1, pooling="mean"))
    world.run_until_idle()
    world.submit(submission("scored", [4] * 700, 5, prompt_logprobs=1))
    world.run_until_idle()
    world.check_all()
    assert world.ends == {"pooled": "pooled", "scored": "length"}


events = st.lists(st.sampled_from(["step", "step", "step", "step", "worker", "half", "kv", "lost lease"]), max_size=120)


@st.composite
def traffic(draw: st.DrawFn) -> Iterator[tuple[list[int], int]]:
    n_same = draw(st.integers(0, 500))
    tail = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    return [1 + i % 50 for i in range(n_same)] + [t for t in tail for _ in range(60)], draw(st.integers(1, 60))  # type: ignore[return-value]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=st.lists(traffic(), min_size=1, max_size=4), happens=events, pages=st.integers(38, 90))
def test_no_death_and_no_eviction_changes_an_answer(
    requests: list[tuple[list[int], int]], happens: list[str], pages: int
) -> None:
    world = windowed(pages=pages, period=3)
    for i, (prompt, n) in enumerate(requests):
        world.submit(submission(f"s{i}", prompt, n, seed=i))
    for event in happens:
        world.strike(event)
    world.run_until_idle()
    world.check_all()
    world.kv.manager.check()  # type: ignore[attr-defined]
    # A sequence that is in every step whose worker dies is taken for the cause (recovery/quarantine.py).
    assert set(world.errors.values()) <= {"", "INFERENCE"}
    assert "INFERENCE" not in world.errors.values() or "worker" in happens or "half" in happens
    assert not world.kv.refused  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [1, 20, 256, 300])
def test_the_first_page_that_is_read_is_that_of_the_lowest_split(window: int) -> None:
    from stages.worker.kernels.attention import lowest_split

    for position in range(0, 1300, 7):
        assert first_read(position, window) == KV_SPLIT * lowest_split.py_func(position, window)
    assert first_read(1000, 0) == 0
