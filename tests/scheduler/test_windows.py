"""Models whose layers all have a sliding window: no page behind it is held, and no answer changes.

The engine works with the kv stage's own manager, and a worker that compares every position that attention reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.protocol import messages as m
from shm import prefix_hash
from shm.pages import KV_SPLIT, PAGE_HEADER, KvArena, first_read
from shm.step_ring import SERIAL, Steps
from stages.kv.manager import Denial, LeaseClaim, Manager
from stages.kv.pool.arena import scan
from stages.kv.pool.page_headers import PageHeaders
from stages.kv.pool.page_pool import PagePool
from tests.kv.world import DIGEST, GEOMETRY

from .peers import Pages, Worker, mix, submission
from .world import World

WINDOW = 40
PAGE_TOKENS = 16
CONTEXT = 1400


class ManagerKv:
    """The kv stage without its sockets. Its arena is that of the worker; it outlives a restart."""

    def __init__(self, steps: Steps, pages: Pages) -> None:
        self.steps = steps
        self.arena = KvArena(
            np.zeros((pages.total, PAGE_HEADER), np.uint8), pages.states.view(np.uint8).reshape(pages.total, -1)
        )
        self.refused: list[str] = []
        self.now = 0
        self.fresh()

    def clock_ns(self) -> int:
        self.now += 1
        return self.now

    def fresh(self) -> None:
        """As after a restart: only the arena is left."""
        pool = PagePool(self.arena, clock_ns=self.clock_ns)
        found = scan(PageHeaders(self.arena.headers), len(self.arena.pages))
        pool.table.adopt(found.full, found.unclaimed)
        root_hash_of = prefix_hash.root_hasher(DIGEST, GEOMETRY)
        self.manager = Manager(pool, PAGE_TOKENS, root_hash_of, self._read, is_reconciled=False)

    def _read(self, row: int, serial: int, begin: int, end: int) -> np.ndarray | None:
        same = int(self.steps.row_ints[row, SERIAL]) == serial
        return self.steps.tokens[row, begin:end].copy() if same else None

    @property
    def leases(self) -> dict[str, Any]:
        return dict(self.manager.leases)

    def ready(self) -> m.KvReady:
        total = len(self.arena.pages)
        return m.KvReady("m", "", "", total, PAGE_TOKENS, 1, self.manager.is_reconciled, generation=1)

    def handle(self, frame: m.Frame) -> m.Frame | None:
        answer = self._handle(frame)
        self.manager.check()
        return answer

    def _handle(self, frame: Any) -> m.Frame | None:
        manager = self.manager
        if isinstance(frame, m.Reconcile):
            self.refused += manager.reconcile(LeaseClaim(*lease) for lease in frame.leases)
            return self.ready()
        if isinstance(frame, m.Commit):
            manager.commit(frame.sequence, frame.n_tokens, frame.unread)
            return None
        if isinstance(frame, m.Release):
            manager.release(frame.sequence, frame.n_tokens)
            return None
        if isinstance(frame, m.Acquire):
            tokens = self.steps.tokens[frame.row, : frame.n_tokens].copy()
            serial = int(self.steps.row_ints[frame.row, SERIAL])
            how = frame.row, serial, frame.salt, frame.sharable, frame.window, frame.ahead
            found = manager.acquire(frame.sequence, tokens, frame.want_tokens, *how)
        else:
            found = manager.extend(frame.sequence, frame.want_tokens)
        if isinstance(found, Denial):
            return m.Denied(frame.id, frame.sequence, *found, frame.model)
        return m.Granted(frame.id, frame.sequence, found.pages, found.cached_tokens, frame.model)


class WindowWorker(Worker):
    """Reads what attention reads: every position from `first_read` on must hold its own state."""

    def _entry(self, slot: int, row: int, start: int, *rest: int) -> None:
        states, tokens, table, size = self.pages.states, self.s.tokens[row], self.s.tables[row], self.pages.page_tokens
        state, low = 0, first_read(start, WINDOW)
        for p in range(start):
            state = mix(state, int(tokens[p]))
            if p >= low:
                assert int(states[table[p // size], p % size]) == state, f"position {p} of a step from {start}"
        super()._entry(slot, row, start, *rest)


def windowed(pages: int, **options: Any) -> World:
    """A world with a window in all layers."""
    world = World(
        pages=pages, page_tokens=PAGE_TOKENS, context=CONTEXT, batch=2, max_step_tokens=32, speculate=4, **options
    )
    world.kv = ManagerKv(world.steps, world.pages)  # type: ignore[assignment]
    world.engine.leases.frames.clear()
    world.engine.leases.is_up = False
    period, world.worker = world.period, WindowWorker(world.steps, world.geometry, world.pages)
    world.worker.period = period
    world.window = WINDOW
    world.attach()
    world.kv_up()
    return world


def bound(world: World) -> int:
    """The most pages of one sequence."""
    return world.engine.leases.most_positions(CONTEXT) // PAGE_TOKENS


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
