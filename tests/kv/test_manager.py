"""The rules of leases, one test for each: the state machine in test_machine.py searches, these explain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shm.pages import PAGE_FREE
from shm.prefix_hash import PageHash
from stages.kv.lease import Denial, Grant, LeaseClaim
from stages.kv.pool.page_headers import PageHeaders
from stages.kv.storage.disk_store import DiskPageStore
from tests.kv.manager_world import World, words
from tests.kv.world import PAGE_BYTES, PAGE_TOKENS


def test_the_page_of_the_last_token_is_never_shared() -> None:
    w = World()
    assert w.run("a", words(1, 2, tail=0)) == 0
    assert w.counts() == (6, 2, 0)
    assert w.run("b", words(1, 2, tail=0)) == 1
    assert w.run("c", words(1, 2, tail=1)) == 2
    assert w.counts() == (6, 2, 0)  # the private copy of page 2 is free again


def test_salt_separates() -> None:
    w = World()
    w.run("a", words(1), salt="x")
    assert w.run("b", words(1)) == 0
    assert w.run("c", words(1), salt="y") == 0
    assert w.run("d", words(1), salt="x") == 1


def test_without_caching_no_page_is_cached() -> None:
    w = World(caching=False)
    assert w.run("a", words(1, 2)) == 0
    assert w.run("b", words(1, 2)) == 0
    assert w.counts() == (8, 0, 0)


def test_a_denial_changes_nothing() -> None:
    w = World()
    w.run("a", words(1, 2))
    w.acquire("b", words(3, 4))
    before = w.m.pool.table.evictable_pages()
    denial = w.acquire("c", words(1, 2, 3), ahead=5 * PAGE_TOKENS)
    # 9 pages of 8: two of them are cached, and referenced while the others are counted.
    assert denial == Denial(False, 7, 3, 8)
    denial = w.acquire("d", words(1, 2, 3), ahead=3 * PAGE_TOKENS)
    assert denial == Denial(True, 5, 3, 8)
    assert w.m.pool.table.evictable_pages() == before
    assert w.m.pool.counters.evictions == 0
    w.m.check()


@pytest.mark.parametrize(
    ("policy", "order"),
    # Requests a, b, c, then a's prefix again: the end of a prefix is evicted before its start.
    [("lru", "b2 b1 c2 c1 a2 a1"), ("fifo", "a2 a1 b2 b1 c2 c1"), ("lfu", "b2 b1 c2 c1 a2 a1")],
)
def test_exact_order_of_eviction(policy: str, order: str) -> None:
    w = World(policy=policy)
    pages = {}
    for who, first in (("a", 1), ("b", 3), ("c", 5)):
        answer = w.acquire(who, words(first, first + 1))
        assert isinstance(answer, Grant)
        pages[f"{who}1"], pages[f"{who}2"] = answer.pages[:2]
        w.m.release(who, 2 * PAGE_TOKENS + 1)
    assert w.run("again", words(1, 2)) == 2
    by_page = {page: name for name, page in pages.items()}
    assert " ".join(by_page[page] for page in w.m.pool.table.evictable_pages()) == order
    w.acquire("flood", words(9), ahead=3 * PAGE_TOKENS)
    gone = order.split()[:3]
    assert w.m.pool.counters.evictions == 3
    assert " ".join(by_page[page] for page in w.m.pool.table.evictable_pages()) == " ".join(order.split()[3:])
    assert all(w.m.pool.table.hash_of(pages[name]) is None for name in gone)


def test_pages_in_use_are_never_evicted() -> None:
    w = World()
    w.run("a", words(1, 2))
    w.acquire("holder", words(1, 2))
    w.acquire("b", words(3, 4, 5, 6))
    assert w.counts() == (0, 0, 8)
    assert isinstance(w.m.extend("b", 6 * PAGE_TOKENS), Denial)
    w.m.release("holder", 0)
    assert isinstance(w.m.extend("b", 6 * PAGE_TOKENS), Grant)
    w.m.check()


def test_cached_pages_expire() -> None:
    w = World(ttl_ns=1000)
    w.run("a", words(1))
    w.clock.now += 900
    w.run("b", words(2))
    w.clock.now += 200
    assert w.m.pool.expire() == 1
    assert w.run("c", words(2)) == 1
    assert w.run("d", words(1)) == 0


def test_copies_on_disk_expire_with_their_pages(tmp_path: Path) -> None:
    w = World(ttl_ns=1000)
    pool = w.m.pool
    store = DiskPageStore(tmp_path / "pages", {}, PAGE_BYTES, 1 << 20, 1, wall_ns=w.clock)
    pool.spill, pool.stores = store, [store]
    w.run("a", words(1, 2))
    assert pool.make_room(pool.total)
    assert len(store) == 2
    w.clock.now += 900
    assert w.run("b", words(1)) == 1  # restored, and recently used again
    w.clock.now += 200
    pool.expire()
    assert store.hashes() == [
        pool.table.hash_of(pool.table.evictable_pages()[0])
    ]  # the other one was unused for too long
    w.clock.now += 700
    assert w.run("c", words(1)) == 1  # from the arena: the copy is idle, its page is not
    w.clock.now += 500
    assert pool.expire() == 0
    assert len(store) == 1
    w.clock.now += 1000
    assert pool.expire() == 1
    assert len(store) == 0
    assert w.run("d", words(1, 2)) == 0
    w.m.check()
    store.close()


def test_the_end_of_a_session_drops_no_page_that_other_requests_share() -> None:
    w = World()
    w.run("a", words(1, 2))
    w.run("b", words(1, 2))
    w.run("turn 1", words(1, 2, 3))
    w.run("turn 2", words(1, 2, 3, 4))
    w.m.remove([(page_hash, 2) for page_hash in w.m.sharable_hashes(np.array(words(1, 2, 3, 4), np.int32))[::-1]])
    assert w.counts() == (6, 2, 0)
    assert w.run("c", words(1, 2, 3)) == 2


def on_disk(path: Path) -> tuple[World, DiskPageStore, list[PageHash]]:
    """A page file with the pages that 20 requests share, and one of a session's turn; no page is in the arena."""
    store = DiskPageStore(path, {}, PAGE_BYTES, 400 * PAGE_BYTES, 1)
    w = World(n_pages=8)
    w.m.pool.stores = [store]
    w.m.pool.spill = store
    for i in range(20):
        w.run(f"r{i}", words(1, 2))
    w.run("turn 1", words(1, 2, 3))
    assert w.m.pool.make_room(8)
    hashes = w.m.sharable_hashes(np.array(words(1, 2, 3), np.int32))
    assert all(page_hash in store for page_hash in hashes)
    return w, store, hashes


@pytest.mark.parametrize("turns", [1, 2])
def test_the_end_of_a_session_drops_no_copy_that_other_requests_share(tmp_path: Path, turns: int) -> None:
    w, store, hashes = on_disk(tmp_path / "pages")
    if turns == 2:  # this one reads them back
        w.run("turn 2", words(1, 2, 3))
    w.m.remove([(page_hash, turns) for page_hash in reversed(hashes)])
    assert [page_hash in store for page_hash in hashes] == [True, True, False]
    assert w.run("next", words(1, 2)) == 2
    w.m.check()
    store.close()


def test_a_page_that_a_sequence_holds_keeps_its_copy(tmp_path: Path) -> None:
    """Its header says that there is one: without it the page would not be saved again."""
    w, store, hashes = on_disk(tmp_path / "pages")
    w.acquire("live", words(1, 2, 3))
    w.m.remove([(page_hash, 99) for page_hash in reversed(hashes)])
    assert all(page_hash in store for page_hash in hashes)
    w.m.release("live", 3 * PAGE_TOKENS)
    w.m.remove([(page_hash, 99) for page_hash in reversed(hashes)])
    assert w.counts() == (8, 0, 0) and not len(store)
    w.m.check()
    store.close()


def test_fragmentation_is_the_share_of_leased_positions_without_a_token() -> None:
    w = World()
    assert w.m.fragmentation() == 0
    w.run("a", words(1, 2))
    assert w.m.fragmentation() == 0  # cached pages are full
    one = w.acquire("b", words(1, 2, 3), ahead=0)
    assert isinstance(one, Grant)
    assert w.m.fragmentation() == pytest.approx((len(one.pages) * PAGE_TOKENS - 49) / (4 * PAGE_TOKENS))
    two = w.acquire("c", words(1, 2), ahead=PAGE_TOKENS)
    assert isinstance(two, Grant)
    unused = 15 + len(two.pages) * PAGE_TOKENS - 33
    assert w.m.fragmentation() == pytest.approx(unused / (w.m.pool.leased * PAGE_TOKENS))
    w.m.commit("c", 45)
    assert w.m.fragmentation() == pytest.approx((unused - 12) / (w.m.pool.leased * PAGE_TOKENS))


def test_of_equal_pages_one_has_the_hash() -> None:
    w = World()
    first, second = w.acquire("a", words(1, 2)), w.acquire("b", words(1, 2))
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert set(first.pages).isdisjoint(second.pages)
    w.m.commit("a", 33)
    w.m.commit("b", 33)
    w.m.check()
    w.m.release("a", 33)
    w.m.release("b", 33)
    assert w.counts() == (6, 2, 0)


def test_tokens_of_a_row_of_another_sequence_are_not_used() -> None:
    w = World()
    answer = w.acquire("a", [1], ahead=2 * PAGE_TOKENS)
    assert isinstance(answer, Grant)
    w.rows.take(0, words(7, 7))  # the row was given to another sequence before the commit arrived
    w.m.commit("a", 33)
    w.m.release("a", 33)
    assert w.counts() == (8, 0, 0)
    assert w.m.pool.counters.unread == 2


def test_pages_of_the_prompt_need_no_row() -> None:
    w = World()
    w.acquire("a", words(1, 2))
    w.rows.take(0, words(7, 7))
    w.m.release("a", 33)
    assert w.counts() == (6, 2, 0)


def test_a_damaged_page_is_dropped_and_the_rest_of_the_prefix_with_it(caplog: pytest.LogCaptureFixture) -> None:
    w = World()
    w.run("a", words(1, 2, 3))
    answer = w.acquire("b", words(1, 2, 3))
    assert isinstance(answer, Grant)
    w.m.release("b", 0)
    w.arena.pages[answer.pages[1], 7] ^= 0x10
    assert w.run("c", words(1, 2, 3)) == 1
    assert w.m.pool.counters.checksum_failures == 1
    assert caplog.messages.count("a page in memory is damaged and was dropped") == 1
    assert w.run("d", words(1, 2, 3)) == 3


def test_damage_found_in_a_reconciliation_is_stored_in_the_arena() -> None:
    """The claim is refused; another restart before its release must not make the page valid again."""
    w = World()
    w.run("a", words(1, 2))
    answer = w.acquire("b", words(1, 2, 3))
    assert isinstance(answer, Grant)
    w.arena.pages[answer.pages[0], 0] ^= 1
    claim = LeaseClaim("b", len(w.tokens) - 1, 33, answer.pages)
    for _ in range(3):
        w.restart()
        assert w.m.reconcile([claim]) == ["b"]
        w.m.check()
        assert set(answer.pages).isdisjoint(w.m.pool.table.evictable_pages())
    w.m.commit("b", 49)  # its pages get no hashes
    w.m.release("b", 49)
    w.m.check()
    assert w.counts()[2] == 0
    assert w.run("c", words(1, 2, 3)) == 0


def test_damage_of_the_last_page_is_found_by_every_successor() -> None:
    """Its header names no lease any more, and the lease is recognised by this page."""
    w = World()
    answer = w.acquire("a", words(1, 2, tail=0))
    assert isinstance(answer, Grant)
    w.m.commit("a", 32)
    w.arena.pages[answer.pages[1], 0] ^= 1
    for _ in range(3):
        w.restart()
        assert w.m.reconcile([LeaseClaim("a", 0, 32, answer.pages)]) == ["a"]
        w.m.check()
    w.m.release("a", 32)
    w.m.check()


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(lambda mine, other: other, id="another's"),
        pytest.param(lambda mine, other: (*mine[:-1], other[-1]), id="partly another's"),
        pytest.param(lambda mine, other: (*mine, mine[0]), id="a page twice"),
        pytest.param(lambda mine, other: (*mine, 99), id="out of bounds"),
        pytest.param(lambda mine, other: (*mine[1:], mine[0]), id="another order"),
        pytest.param(lambda mine, other: (*mine, 7), id="a free page"),
        pytest.param(lambda mine, other: mine[:1], id="too few"),
        pytest.param(lambda mine, other: (), id="none"),
    ],
)
def test_a_wrong_claim_is_refused(pages) -> None:  # type: ignore[no-untyped-def]
    w = World()
    mine, other = w.acquire("a", words(1, 2)), w.acquire("b", words(3, 4))
    assert isinstance(mine, Grant)
    assert isinstance(other, Grant)
    w.m.commit("a", 33)
    w.restart()
    good = LeaseClaim("b", 1, 33, other.pages)
    assert w.m.reconcile([good, LeaseClaim("a", 0, 33, pages(mine.pages, other.pages))]) == ["a"]
    w.m.check()
    w.m.release("a", 33)
    w.m.release("b", 33)
    w.m.check()
    assert w.counts()[2] == 0


def test_a_grant_that_was_lost_takes_no_page_from_its_sequence() -> None:
    """Both processes live: the scheduler claims what it knows, and a step in flight writes its last page."""
    w = World()
    mine = w.acquire("a", words(1, 2, tail=3))
    assert isinstance(mine, Grant)
    assert isinstance(w.m.extend("a", 4 * PAGE_TOKENS), Grant)
    w.m.commit("a", 2 * PAGE_TOKENS)
    w.m.is_reconciled = False
    assert w.m.reconcile([LeaseClaim("a", 0, 33, mine.pages)]) == []
    assert w.counts() == (5, 0, 3)
    other = w.acquire("b", words(5, 6, 7))
    assert isinstance(other, Grant)
    assert not set(mine.pages) & set(other.pages)
    again = w.m.extend("a", 4 * PAGE_TOKENS)
    assert isinstance(again, Grant)
    assert again.pages[:3] == mine.pages
    w.m.release("a", 33)
    w.m.release("b", 33)
    w.m.check()
    assert w.counts()[2] == 0


@pytest.mark.parametrize(
    "claimed",
    [
        pytest.param(lambda mine, other: (*mine[:-1], other[0]), id="another sequence's page"),
        pytest.param(lambda mine, other: (*mine[1:], mine[0]), id="another order"),
        pytest.param(lambda mine, other: (*mine, 7), id="a free page"),
        pytest.param(lambda mine, other: mine[:1], id="fewer than are cached"),
    ],
)
def test_a_claim_against_a_living_lease_frees_no_page_before_the_release(claimed) -> None:  # type: ignore[no-untyped-def]
    w = World()
    mine, other = w.acquire("a", words(1, 2)), w.acquire("b", words(3, 4))
    assert isinstance(mine, Grant)
    assert isinstance(other, Grant)
    w.m.commit("a", 2 * PAGE_TOKENS)
    claims = [LeaseClaim("b", 1, 33, other.pages), LeaseClaim("a", 0, 33, claimed(mine.pages, other.pages))]
    for _ in range(2):
        w.m.is_reconciled = False
        assert w.m.reconcile(claims) == ["a"]
        w.m.check()
        assert w.counts()[2] == len(mine.pages) + len(other.pages)
    third = w.acquire("c", words(5))
    assert isinstance(third, Grant)
    assert not set(third.pages) & {*mine.pages, *other.pages}
    for who in "abc":
        w.m.release(who, 33)
    w.m.check()
    assert w.counts()[2] == 0


@pytest.mark.parametrize("restarts", [True, False])
def test_a_claim_that_was_refused_once_is_refused_until_the_release(restarts: bool) -> None:
    """The refusal may be lost: the pages of a suspect lease prove nothing, though the next claim has the same ones."""
    w = World()
    mine = w.acquire("a", words(1, 2))
    assert isinstance(mine, Grant)
    w.m.commit("a", 2 * PAGE_TOKENS)
    if restarts:
        w.restart()
    else:
        w.m.is_reconciled = False
    claim = LeaseClaim("a", 0, 33, (mine.pages[1], mine.pages[0], mine.pages[2]))
    assert w.m.reconcile([claim]) == ["a"]
    for pages in (claim.pages, tuple(w.m.leases["a"].pages), mine.pages):
        w.m.is_reconciled = False
        assert w.m.reconcile([claim._replace(pages=pages)]) == ["a"]
        w.m.check()
    w.m.release("a", 33)
    w.m.check()
    assert w.counts()[2] == 0


def test_a_suspect_lease_gets_no_more_pages_and_is_not_granted_again() -> None:
    """It may hold pages of other sequences, which a step of its own must not write."""
    w = World()
    mine, other = w.acquire("a", words(1, 2)), w.acquire("b", words(3, 4))
    assert isinstance(mine, Grant)
    assert isinstance(other, Grant)
    w.m.commit("b", 2 * PAGE_TOKENS)
    w.m.is_reconciled = False
    wrong = (*mine.pages[:-1], other.pages[0])
    assert w.m.reconcile([LeaseClaim("a", 0, 33, wrong), LeaseClaim("b", 1, 33, other.pages)]) == ["a"]
    assert other.pages[0] in w.m.leases["a"].pages
    assert isinstance(w.m.extend("a", 5 * PAGE_TOKENS), Denial)
    # Its release was lost: the same row, serial and tokens.
    again = w.m.acquire("a", np.array(words(1, 2), np.int32), 33, 0, 1)
    assert isinstance(again, Grant)
    assert not set(again.pages) & set(other.pages)
    w.m.check()


def test_no_page_is_granted_before_the_reconciliation() -> None:
    w = World()
    held = w.acquire("a", words(1))
    assert isinstance(held, Grant)
    w.restart()
    assert w.counts() == (6, 0, 2)
    assert isinstance(w.acquire("b", words(2)), Denial)
    assert isinstance(w.m.extend("a", 64), Denial)
    assert w.m.reconcile([]) == []
    assert w.counts() == (8, 0, 0)
    assert all(PageHeaders(w.arena.headers).state(page) == PAGE_FREE for page in range(8))
    assert isinstance(w.acquire("b", words(2)), Grant)


def test_frames_of_unknown_sequences_are_ignored() -> None:
    w = World()
    w.m.commit("absent", 100)
    w.m.release("absent", 100)
    assert w.m.extend("absent", 100) == Denial(True, 7, 8, 8)
    w.acquire("a", words(1))
    w.m.commit("a", 10_000)  # more than it has
    w.m.release("a", 10_000)
    w.m.check()
    assert w.counts() == (7, 1, 0)


def test_a_repeated_acquire_gets_the_same_grant() -> None:
    w = World()
    w.run("a", words(1))
    row, tokens = 5, words(1, 2)
    serial = w.rows.take(row, tokens)
    first = w.m.acquire("b", np.array(tokens, np.int32), 40, row, serial)
    again = w.m.acquire("b", np.array(tokens, np.int32), 40, row, serial)
    assert first == again == Grant(first.pages, PAGE_TOKENS)  # type: ignore[union-attr]
    other = w.rows.take(row, tokens)  # the row was taken again: a new lease
    assert isinstance(w.m.acquire("b", np.array(tokens, np.int32), 40, row, other), Grant)
    w.m.check()
    assert w.counts()[2] == 3


@pytest.mark.parametrize(("sharable", "pages"), [(-1, 3), (0, 0), (PAGE_TOKENS - 1, 0), (2 * PAGE_TOKENS, 2), (999, 3)])
def test_no_more_positions_are_shared_than_the_scheduler_allows(sharable: int, pages: int) -> None:
    world = World(n_pages=12)
    tokens = words(1, 2, 3)
    first = world.acquire("a", tokens)
    assert isinstance(first, Grant)
    world.m.commit("a", len(tokens))
    row, prompt = len(world.tokens), np.array(tokens, np.int32)
    serial = world.rows.take(row, tokens)
    for _ in range(2):  # an answer may be lost
        grant = world.m.acquire("b", prompt, len(tokens), row, serial, sharable=sharable)
        assert isinstance(grant, Grant)
        assert grant.cached_tokens == pages * PAGE_TOKENS
        assert grant.pages[:pages] == first.pages[:pages]
        assert not set(grant.pages[pages:]) & set(first.pages)
    again = world.m.acquire("b", prompt, len(tokens), row, serial, sharable=0)
    assert isinstance(again, Grant)
    assert again.cached_tokens == 0
