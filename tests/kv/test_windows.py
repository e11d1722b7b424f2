"""Leases of sequences whose layers all have a window: which pages they hold, share and fetch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shm.pages import KV_SPLIT, first_read
from stages.kv.lease import Denial, Grant, LeaseClaim
from stages.kv.pool.page_pool import NO_PAGE
from stages.kv.storage.disk_store import DiskPageStore
from tests.kv.test_manager import World
from tests.kv.world import PAGE_BYTES, PAGE_TOKENS, contents

WINDOW = 40
SPLIT = KV_SPLIT // PAGE_TOKENS  # pages
TOKENS = [1 + i // PAGE_TOKENS for i in range(40 * PAGE_TOKENS + 3)]
UNREAD = 2 * SPLIT  # pages before the window of the last token


class Windowed(World):
    """Grants at most two pages ahead."""

    def begin(self, who: str, tokens: list[int], row: int = 0) -> Grant | Denial:
        serial = self.rows.take(row, tokens)
        self.tokens[who] = tokens
        return self.m.acquire(
            who, np.array(tokens, np.int32), len(tokens), row, serial, window=WINDOW, ahead=2 * PAGE_TOKENS
        )

    def compute(self, who: str, tokens: list[int], grant: Grant) -> Grant:
        """The whole sequence, two pages at a time."""
        done = grant.cached_tokens
        while done < len(tokens):
            want = min(len(tokens), done + 2 * PAGE_TOKENS)
            answer = self.m.extend(who, want)
            assert isinstance(answer, Grant)
            grant = answer
            for i in range(done // PAGE_TOKENS, want // PAGE_TOKENS):
                self.arena.pages[grant.pages[i]] = contents(tokens, i)
            done = want
            unread = max(0, done + 1 - WINDOW) // KV_SPLIT * KV_SPLIT
            self.m.commit(who, done, unread)
            self.m.check()
        return grant

    def claim(self, who: str, row: int = 0) -> LeaseClaim:
        lease = self.m.leases[who]
        return LeaseClaim(who, row, lease.n_tokens, tuple(lease.pages))


@pytest.fixture
def world() -> Windowed:
    return Windowed(n_pages=24)


def first_run(world: Windowed) -> None:
    grant = world.begin("a", TOKENS)
    assert isinstance(grant, Grant)
    assert len(grant.pages) == 2
    world.compute("a", TOKENS, grant)


def test_pages_behind_the_window_are_cached_and_can_be_evicted(world: Windowed) -> None:
    first_run(world)
    lease = world.m.leases["a"]
    assert lease.pages[:UNREAD] == [NO_PAGE] * UNREAD
    assert world.m.pool.leased == len(lease.held) == 41 - UNREAD
    assert world.m.pool.cached == 24 - len(lease.held)
    world.m.commit("a", len(TOKENS), KV_SPLIT)  # late: they are released already
    world.m.check()


def test_the_last_page_is_never_released(world: Windowed) -> None:
    first_run(world)
    world.m.commit("a", len(TOKENS), 10 * len(TOKENS))
    assert world.m.pool.leased == 1
    world.m.check()


def test_a_continuation_shares_the_window_alone(world: Windowed) -> None:
    first_run(world)
    world.m.release("a", len(TOKENS))
    grant = world.begin("b", [*TOKENS, 5, 5], row=1)
    assert isinstance(grant, Grant)
    assert grant.cached_tokens == 40 * PAGE_TOKENS
    assert grant.pages[:UNREAD] == (NO_PAGE,) * UNREAD
    for i in range(UNREAD, 40):
        np.testing.assert_array_equal(world.arena.pages[grant.pages[i]], contents(TOKENS, i))
    again = world.m.acquire(  # the answer was lost
        "b", np.array([*TOKENS, 5, 5], np.int32), len(TOKENS) + 2, 1, world.rows.rows[1][0], window=WINDOW, ahead=32
    )
    assert again == grant
    world.m.check()


def test_the_longest_prefix_whose_window_is_whole_is_shared(world: Windowed) -> None:
    """A page of the last window is damaged; the pages 16 to 30 are cached still, and 31 is evicted."""
    first_run(world)
    held = world.m.leases["a"].held
    world.m.release("a", len(TOKENS))
    world.arena.pages[held[2], 5] ^= 1
    grant = world.begin("b", TOKENS, row=1)
    assert isinstance(grant, Grant)
    assert grant.cached_tokens == 31 * PAGE_TOKENS
    assert grant.pages[:SPLIT] == (NO_PAGE,) * SPLIT
    assert world.m.pool.counters.checksum_failures == 1
    world.m.check()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_lease_survives_a_restart_of_either_side(world: Windowed, is_lost: bool) -> None:
    first_run(world)
    claim = world.claim("a")
    if is_lost:  # the scheduler has released more than kv has been told
        claim = claim._replace(pages=(NO_PAGE,) * (UNREAD + 1) + claim.pages[UNREAD + 1 :])
        assert world.m.reconcile([claim]) == []
        assert world.m.leases["a"].n_unread == UNREAD + 1
    world.restart()
    assert world.m.reconcile([claim]) == []
    world.m.check()
    lease = world.m.leases["a"]
    assert tuple(lease.pages) == claim.pages
    more = TOKENS + [77] * 2 * PAGE_TOKENS
    world.rows.rows[0] = (world.rows.rows[0][0], more)
    assert isinstance(world.m.extend("a", len(more)), Grant)
    world.m.commit("a", len(more))
    world.m.release("a", len(more))
    world.m.check()
    grant = world.begin("b", more, row=1)
    assert isinstance(grant, Grant)
    assert grant.cached_tokens == len(more) // PAGE_TOKENS * PAGE_TOKENS  # its hashes continue those before the gap


@pytest.mark.parametrize("pages", [(NO_PAGE,) * 41, (NO_PAGE,) * 50 + (0,)])
def test_a_claim_of_no_page_or_of_uncomputed_ones_is_refused(world: Windowed, pages: tuple[int, ...]) -> None:
    first_run(world)
    claim = world.claim("a")._replace(pages=pages)
    world.restart()
    assert world.m.reconcile([claim]) == ["a"]
    world.m.check()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_window_comes_back_from_disk_as_a_whole_or_an_earlier_one_is_shared(tmp_path: Path, is_damaged: bool) -> None:
    world = Windowed(n_pages=24)
    pool = world.m.pool
    store = DiskPageStore(tmp_path / "pages", {}, PAGE_BYTES, 1 << 20, 1, wall_ns=world.clock)
    pool.spill, pool.stores = store, [store]
    first_run(world)
    world.m.release("a", len(TOKENS))
    assert pool.make_room(20)  # some pages of the window are on disk only
    outside = world.m.pages_outside(world.m.sharable_hashes(np.array(TOKENS, np.int32)), WINDOW, len(TOKENS))
    assert 0 < len(outside) < 40 - UNREAD
    if is_damaged:
        for cell in store._cell_of.values():
            os.pwrite(store._fd, b"\xbb" * 100, store._file.layout.page_at(cell))
    grant = world.begin("b", TOKENS, row=1)
    assert isinstance(grant, Grant)
    # Pages that are in the arena still make up the window of an earlier place.
    end = grant.cached_tokens
    assert (0 < end < 40 * PAGE_TOKENS) if is_damaged else end == 40 * PAGE_TOKENS
    for i in range(first_read(end, WINDOW) // PAGE_TOKENS, end // PAGE_TOKENS):
        np.testing.assert_array_equal(world.arena.pages[grant.pages[i]], contents(TOKENS, i))
    world.m.check()
    world.compute("b", TOKENS, grant)
    world.m.release("b", len(TOKENS))
    world.m.check()
    store.close()
