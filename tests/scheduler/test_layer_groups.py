"""Models in which only some layers have a sliding window: their pages behind it are not held, and no answer changes."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm.layer_groups import LayerGroups

from .peers import submission
from .windowed import CONTEXT, PAGE_TOKENS, windowed
from .world import World

GROUPS = LayerGroups(4, 1)  # as a model with a window in three of four layers
PROMPT = [1 + i % 90 for i in range(900)]


def run(world: World) -> int:
    """Run until idle; returns the most pages that were leased at once."""
    most = 0
    while world.engine.is_busy:
        world.run_round()
        world.exchange_with_kv()
        most = max(most, world.kv.manager.pool.leased)  # type: ignore[attr-defined]
        world.compute_step()
        world.collect()
    world.exchange_with_kv()
    world.check_all()
    return most


def test_a_long_sequence_holds_all_pages_of_one_group_and_the_window_of_the_others() -> None:
    world = windowed(pages=400, groups=GROUPS)
    world.submit(submission("s", PROMPT, 400, seed=3))
    n_places = -(-CONTEXT // PAGE_TOKENS)
    bound = world.engine.leases.most_pages(CONTEXT)
    assert bound < 0.6 * GROUPS.n_pages(n_places)
    most = run(world)
    assert world.ends == {"s": "length"}
    assert 1300 // PAGE_TOKENS < most <= bound


def test_sequences_fit_that_did_not_fit_with_all_pages() -> None:
    """An arena of 300 pages has room for one sequence of 1,300 positions with all layers, and for two with groups."""
    world = windowed(pages=300, groups=GROUPS)
    assert 2 * GROUPS.n_pages(-(-1300 // PAGE_TOKENS)) > 300
    for name in ("a", "b"):
        world.submit(submission(name, [*PROMPT, ord(name)], 400, seed=3, cache_salt=name))
    run(world)
    assert world.ends == {"a": "length", "b": "length"}
    assert world.engine.stats.preemptions == 0
    world.submit(submission("c", PROMPT, 400, seed=3))
    world.run_until_idle()
    world.check_all()
    small = windowed(pages=100, groups=GROUPS)
    small.submit(submission("s", PROMPT, 400, seed=3))
    small.run_until_idle()
    assert small.errors["s"] == "INSUFFICIENT_RESOURCES"


def test_a_prompt_waits_for_the_pages_of_its_whole_text() -> None:
    """Pages of a prompt are leased as it is computed; it begins only when all that it takes fit."""
    world = windowed(pages=200, groups=GROUPS)
    for name in ("a", "b"):
        world.submit(submission(name, [*PROMPT, ord(name)], 40, seed=3, cache_salt=name))
    run(world)
    assert world.ends == {"a": "length", "b": "length"}
    assert world.engine.stats.preemptions == 0


def test_a_continued_text_shares_all_pages_of_one_group_and_the_window_of_the_others() -> None:
    world = windowed(pages=210, groups=GROUPS)
    world.submit(submission("first", PROMPT, 100, seed=3))
    world.run_until_idle()
    world.submit(submission("second", PROMPT + world.tokens["first"] + [7] * 20, 50, seed=4))
    world.run_round()
    world.exchange_with_kv()
    world.run_round()
    [sequence] = world.engine.table.scheduled
    assert sequence.cached_tokens == 999 // PAGE_TOKENS * PAGE_TOKENS
    assert [page == -1 for page in sequence.run.pages[: GROUPS.n_groups]] == [False, True, True, True]
    world.run_until_idle()
    world.check_all()
    world.submit(submission("third", [*PROMPT[:200], 9, 9, 9], 10, seed=4))
    world.run_until_idle()
    world.check_all()
    assert world.ends == dict.fromkeys(("first", "second", "third"), "length")


def test_pooled_prompts_and_scored_ones_release_pages_too() -> None:
    world = windowed(pages=190, groups=GROUPS)
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
@given(
    requests=st.lists(traffic(), min_size=1, max_size=4),
    happens=events,
    pages=st.integers(190, 400),
    groups=st.sampled_from([LayerGroups(4, 1), LayerGroups(3, 2), LayerGroups(2, 1)]),
)
def test_no_death_and_no_eviction_changes_an_answer(
    requests: list[tuple[list[int], int]], happens: list[str], pages: int, groups: LayerGroups
) -> None:
    world = windowed(pages=pages, groups=groups, period=3)
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
