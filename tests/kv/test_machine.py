"""The manager against the plain model, through any interleaving of requests, crashes and damage."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from shm import huge_pages, prefix_hash
from shm.arena import HEADER_BYTES
from shm.pages import KvArena, attach_kv, create_kv, kv_arena_bytes, pages_offset
from shm.prefix_hash import PageHash
from stages.kv.lease import Denial, Grant, LeaseClaim
from stages.kv.manager import Manager
from stages.kv.pool.arena import scan
from stages.kv.pool.extents import Extents
from stages.kv.pool.page_headers import PageHeaders
from stages.kv.pool.page_pool import PageUse
from stages.kv.storage.disk_store import DiskPageStore
from stages.kv.storage.page_file import BLOCK
from tests.kv.plain import Name, Page, Plain
from tests.kv.world import (
    DIGEST,
    GEOMETRY,
    PAGE_BYTES,
    PAGE_TOKENS,
    Clock,
    FakeRows,
    contents,
    manager,
    small_arena,
)

TOTAL = 8


class Rules(RuleBasedStateMachine):
    """Few pages, few tokens, few salts: prefixes overlap and the arena is always nearly full."""

    policy = "lru"
    disk_room = 0
    ttl_ns = 0
    memory: Extents | None = None
    sequences: Bundle[str] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.rows = FakeRows()
        self.arena = self._open_arena()
        self.store: DiskPageStore | None = None
        if self.disk_room:
            self.directory = tempfile.TemporaryDirectory()
            self.store = self._open_store()
        self.manager = self._manager()
        self.plain = Plain(TOTAL, PAGE_TOKENS, self.policy, disk_room=self.disk_room)
        self.count = self.n_warmed = 0
        self.computed: dict[str, int] = {}  # positions of each sequence
        self.tables: dict[str, tuple[int, ...]] = {}
        self.row_of: dict[str, int] = {}
        self.leased_at: dict[tuple[str, int], int] = {}

    def _open_arena(self) -> KvArena:
        return small_arena(TOTAL)

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
            self.directory.cleanup()

    def _open_store(self) -> DiskPageStore:
        room = 2 * BLOCK + self.disk_room * PAGE_BYTES
        path = Path(self.directory.name) / "pages"
        return DiskPageStore(path, {}, PAGE_BYTES, room, 1, wall_ns=lambda: self.clock.now)

    def _manager(self) -> Manager:
        return manager(
            self.arena,
            self.rows,
            policy=self.policy,
            clock_ns=self.clock,
            ttl_ns=self.ttl_ns,
            spill=self.store,
            stores=[] if self.store is None else [self.store],
            memory=self.memory,
        )

    # -------------------------------------------------------------- the scheduler and the worker

    def _tokens(self, words: list[int], tail: int) -> list[int]:
        """A page is 16 tokens of one word, so that common prefixes are likely; then part of a page."""
        return [word for word in words for _ in range(PAGE_TOKENS)] + [99] * tail

    def _compute(self, who: str, n_tokens: int) -> None:
        """The worker writes all positions below `n_tokens` that are not computed."""
        held = self.plain.held[who]
        for i in range(self.computed[who] // PAGE_TOKENS, -(-n_tokens // PAGE_TOKENS)):
            page = self.tables[who][i]
            if (i + 1) * PAGE_TOKENS <= n_tokens:
                self.arena.pages[page] = contents(held.tokens, i, held.salt)
            else:
                self.arena.pages[page] = 0xEE
        self.computed[who] = max(self.computed[who], n_tokens)

    def _granted(self, who: str, pages: tuple[int, ...]) -> None:
        now = self.manager.pool.headers
        for i in range(len(self.tables.get(who, ())), len(pages)):
            self.leased_at[who, i] = now.last_use_ns(pages[i])
        self.tables[who] = pages

    # -------------------------------------------------------------- rules

    @rule(
        target=sequences,
        words=st.lists(st.integers(1, 3), max_size=5),
        tail=st.integers(0, 3),
        output=st.integers(0, 40),
        salt=st.sampled_from(["", "", "tenant"]),
        ahead=st.integers(0, 20),
    )
    def acquire(self, words: list[int], tail: int, output: int, salt: str, ahead: int) -> str:
        prompt = self._tokens(words, tail) or [5]
        who = f"s{self.count}"
        row = self.count % 64
        self.count += 1
        serial = self.rows.take(row, prompt)
        before = self.clock.now
        answer = self.manager.acquire(who, np.array(prompt, np.int32), len(prompt) + ahead, row, serial, salt)
        expected = self.plain.acquire(who, prompt, len(prompt) + ahead, salt, before + 1)
        if isinstance(answer, Denial):
            assert expected is None
            assert answer.fits == (-(-(len(prompt) + ahead) // PAGE_TOKENS) <= TOTAL)
            assert answer.free == self.plain.free + self.plain.cached or answer.needed > answer.free
            return who
        assert answer.cached_tokens == expected
        assert answer.cached_tokens < len(prompt)  # the last token's logits are needed
        assert len(answer.pages) * PAGE_TOKENS >= len(prompt) + ahead
        self.row_of[who] = row
        self._granted(who, answer.pages)
        self.computed[who] = answer.cached_tokens
        for i in range(answer.cached_tokens // PAGE_TOKENS):
            np.testing.assert_array_equal(self.arena.pages[answer.pages[i]], contents(prompt, i, salt))
        # Its output, of two words, so that outputs of different sequences overlap too.
        grown = prompt + self._tokens([7, 8], 0)[:output]
        self.plain.held[who].tokens = grown
        self.rows.rows[row] = (serial, grown)
        return who

    @rule(who=sequences)
    def acquire_again(self, who: str) -> None:
        """The answer to an acquire was lost: before anything is committed, the answer is the same."""
        held = self.plain.held.get(who)
        if held is None or not held.is_new or held.n_final != held.cached:
            return
        row = self.row_of[who]
        prompt = np.array(held.tokens[: held.prompt], np.int32)
        again = self.manager.acquire(who, prompt, 1, row, self.rows.rows[row][0], held.salt)
        assert again == Grant(self.tables[who], held.cached * PAGE_TOKENS)

    @rule(who=sequences, more=st.integers(1, 40))
    def extend(self, who: str, more: int) -> None:
        if who not in self.plain.held:
            return
        want = len(self.tables[who]) * PAGE_TOKENS + more
        answer = self.manager.extend(who, want)
        assert isinstance(answer, Grant) == self.plain.extend(who, want)
        if isinstance(answer, Grant):
            assert answer.pages[: len(self.tables[who])] == self.tables[who]
            self._granted(who, answer.pages)

    @rule(who=sequences, more=st.integers(1, 40))
    def grant_is_lost(self, who: str, more: int) -> None:
        """Both processes live; the scheduler claims what it knows when they have contact again."""
        if who not in self.plain.held:
            return
        missing = -(-more // PAGE_TOKENS)
        if missing > self.manager.pool.free:
            return  # nothing is evicted for it
        before = self.manager.count()
        assert isinstance(self.manager.extend(who, len(self.tables[who]) * PAGE_TOKENS + more), Grant)
        self.manager.is_reconciled = False
        claims = [LeaseClaim(one, self.row_of[one], self.computed[one], self.tables[one]) for one in self.plain.held]
        assert self.manager.reconcile(claims) == []
        assert self.manager.count() == before

    @rule(who=sequences, part=st.floats(0, 1))
    def step_and_commit(self, who: str, part: float) -> None:
        held = self.plain.held.get(who)
        if held is None:
            return
        limit = min(len(held.tokens), len(self.tables[who]) * PAGE_TOKENS)
        n_tokens = max(self.computed[who], int(limit * part))
        self._compute(who, n_tokens)
        self.manager.commit(who, n_tokens)
        self.plain.commit(who, n_tokens, self.leased_at)

    @rule(who=consumes(sequences), part=st.floats(0, 1))
    def release(self, who: str, part: float) -> None:
        held = self.plain.held.get(who)
        if held is None:
            self.manager.release(who, 0)
            return
        n_tokens = int(self.computed[who] * part)
        self.manager.release(who, n_tokens)
        self.plain.commit(who, n_tokens, self.leased_at)
        self.plain.release(who, self.clock.now)
        self._gone(who)

    @rule(
        words=st.lists(st.integers(1, 3), min_size=1, max_size=5),
        salt=st.sampled_from(["", "", "", "tenant"]),
        output=st.integers(0, 40),
    )
    def whole_request(self, words: list[int], salt: str, output: int) -> None:
        """A request without any other in between: most cached pages come from these."""
        who = self.acquire(words, 1, output, salt, output)
        self.step_and_commit(who, 1.0)
        self.release(who, 1.0)

    def _gone(self, who: str) -> None:
        del self.tables[who], self.computed[who], self.row_of[who]

    @rule(count=st.integers(1, TOTAL + 1))
    def evict(self, count: int) -> None:
        """Make room without taking the pages."""
        assert self.manager.pool.make_room(count) == self.plain.room(count)

    @precondition(lambda self: self.disk_room and self.manager.is_reconciled)
    @rule(which=st.integers(0, 7), uses=st.integers(1, 3))
    def warm(self, which: int, uses: int) -> None:
        """A page on disk is loaded into a free page before a sequence needs it; it is evicted first."""
        names = list(self.plain.disk)
        if not names or self.store is None:
            return
        name = names[which % len(names)]
        self.n_warmed += 1
        use = PageUse(uses, 1000 - self.n_warmed, 1)
        may = self.plain.free > 0 and name not in self.plain.pages
        is_loaded = self.manager.pool.warm(self.store, PageHash(self._digest(name)), use)
        assert is_loaded == (may and self.plain.restore(name))
        if is_loaded:
            ordinal = (len(name) - 1) // PAGE_TOKENS - 1
            self.plain.pages[name] = Page(ordinal, use.born_ns, use.last_use_ns, uses)

    @rule(words=st.lists(st.integers(1, 3), min_size=1, max_size=4), salt=st.sampled_from(["", "tenant"]))
    def close(self, words: list[int], salt: str) -> None:
        """A session is closed, and its pages are freed at once, the last one first."""
        tokens = self._tokens(words, 0)
        names = [self.plain.name(tokens, i, salt) for i in range(len(words))]
        self.manager.pool.remove([self._digest(name) for name in reversed(names)])  # type: ignore[misc]
        self.plain.remove(names)

    @precondition(lambda self: self.ttl_ns)
    @rule()
    def expire(self) -> None:
        before = self.clock.now + 1 - self.ttl_ns
        idle = self.store.idle(before) if self.store is not None else []  # type: ignore[arg-type]
        names = [name for name in self.plain.disk if self._digest(name) in idle]
        self.manager.pool.expire()
        self.plain.expire(before, names)

    @rule(which=st.integers(0, TOTAL - 1))
    def damage_a_cached_page(self, which: int) -> None:
        """It is dropped when a sequence acquires it."""
        cached = self.manager.pool.table.evictable_pages()
        if cached:
            page = cached[which % len(cached)]
            self.plain.pages[self._plain_name(page)].is_damaged = True
            self.arena.pages[page] = 0xDD

    @rule(which=st.integers(0, 7))
    def damage_a_page_on_disk(self, which: int) -> None:
        """It is dropped when it is read."""
        if self.store is not None and len(self.store):
            digest = self.store.hashes()[which % len(self.store)]
            cell = self.store._cell_of[digest]
            os.pwrite(self.store._fd, b"\xbb" * 100, self.store._file.layout.page_at(cell) + 8 * which)
            self.plain.disk[list(self.plain.disk)[which % len(self.store)]] = True

    @rule(lost=st.sets(st.integers(0, 9)), damaged=st.none() | st.integers(0, TOTAL - 1))
    def crash(self, lost: set[int], damaged: int | None) -> None:
        """SIGKILL: only the arena and the page file survive. The scheduler reconciles its leases.

        Sequences in `lost` ended meanwhile, and their release frames were lost.  If a full page is damaged, the
        claims of all sequences that hold it are refused.
        """
        shared = [name for name, page in self.plain.pages.items() if page.refs]
        if damaged is not None and shared:
            name = shared[damaged % len(shared)]
            self.plain.pages[name].is_damaged = True
            self.arena.pages[self._page_of(name)] = 0xDD

        if self.store is not None:
            self.store.close()  # as the kernel does for a killed process
            self.store = self._open_store()
            there = self.store.hashes()
            assert set(there) == {self._digest(name) for name in self.plain.disk}
            # Its records contain the last use of a page before it was saved, not when it was read.
            self.plain.disk = dict(
                sorted(self.plain.disk.items(), key=lambda item: there.index(self._digest(item[0])))  # type: ignore[arg-type]
            )
        self._reopen_arena()
        self.manager = self._manager()
        found = scan(PageHeaders(self.arena.headers), TOTAL if self.memory is None else self.memory.n_pages)
        assert found.n_torn == 0
        self.manager.pool.table.adopt(found.full, found.unclaimed)
        self.manager.is_reconciled = False
        self.manager.check()
        assert isinstance(self.manager.acquire("early", np.array([1], np.int32), 1), Denial)
        before = self.manager.count()
        assert self.manager.pool.expire() == 0  # the scheduler may name any of these pages
        assert self.manager.count() == before

        for i, who in enumerate(list(self.plain.held)):
            if i in lost:
                self._forget(who)
        claims = [LeaseClaim(who, self.row_of[who], self.computed[who], self.tables[who]) for who in self.plain.held]
        refused = self.manager.reconcile(claims)
        bad = next((n for n in shared if self.plain.pages[n].is_damaged and self.plain.pages[n].refs), None)
        for who, held in self.plain.held.items():
            assert (who in refused) == (bad is not None and bad in held.names)
            held.is_new = False
        if not refused:
            assert self.manager.reconcile(claims) == []  # the same claims again change nothing
        if bad is not None:
            del self.plain.pages[bad]
            for who in refused:
                self.manager.release(who, 0)
                held = self.plain.held[who]
                held.names = [name for name in held.names if name not in (None, bad)]
                self.plain.release(who, self.clock.now)
                self._gone(who)

    def _reopen_arena(self) -> None:
        """The successor maps the arena."""

    def _forget(self, who: str) -> None:
        for name in self.plain.held.pop(who).names:
            if name is not None:
                self.plain.pages[name].refs -= 1
        self._gone(who)

    @precondition(lambda self: self.plain.held)
    @rule(data=st.data())
    def scheduler_restarts(self, data: st.DataObject) -> None:
        """The scheduler dies and its successor holds no leases; the worker no longer uses the pages."""
        self.manager.is_reconciled = False
        for who in list(self.plain.held):
            self.plain.release(who, 0)
            self._gone(who)
        self.manager.reconcile([])
        # The manager decides in which order and when the leases end: copy its times.
        for name, page in self.plain.pages.items():
            if page.last == 0:
                page.last = self.manager.pool.headers.last_use_ns(self._page_of(name))

    # -------------------------------------------------------------- invariants

    def _digest(self, name: Name) -> bytes:
        salt, *tokens = name
        root = prefix_hash.root_hash(DIGEST, GEOMETRY, str(salt))
        return prefix_hash.page_hashes(root, np.array(tokens, np.int32), PAGE_TOKENS)[-1]

    def _page_of(self, name: Name) -> int:
        page = self.manager.pool.table.get_cached_page(self._digest(name))
        assert page is not None
        return page

    def _plain_name(self, page: int) -> Name:
        digest = self.manager.pool.table.hash_of(page)
        return next(name for name in self.plain.pages if self._digest(name) == digest)

    @invariant()
    def conserves_pages(self) -> None:
        self.manager.check()
        m = self.manager.pool
        assert m.free + m.cached + m.leased == TOTAL
        assert (m.free, m.cached, m.leased) == (self.plain.free, self.plain.cached, self.plain.leased)

    @invariant()
    def caches_the_same_pages(self) -> None:
        assert set(self.manager.pool.table.hashes()) == {self._digest(name) for name in self.plain.pages}

    @invariant()
    def has_the_same_copies_on_disk(self) -> None:
        if self.store is not None:
            assert self.store.hashes() == [self._digest(name) for name in self.plain.disk]

    @invariant()
    def evicts_in_the_same_order(self) -> None:
        order = [self.manager.pool.table.hash_of(page) for page in self.manager.pool.table.evictable_pages()]
        assert order == [self._digest(name) for name in self.plain.victims()]

    @invariant()
    def shares_only_full_pages(self) -> None:
        owners: dict[int, list[str]] = {}
        for who, table in self.tables.items():
            for page in table:
                owners.setdefault(page, []).append(who)
        for page, names in owners.items():
            assert len(names) == 1 or self.manager.pool.table.hash_of(page) is not None


class SpillRules(Rules):
    disk_room = 5


class TtlRules(SpillRules):
    ttl_ns = 15


class GrowingRules(TtlRules):
    """The pages get memory in extents of three."""

    def _open_arena(self) -> KvArena:
        self.arena_directory = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="starling-")
        self.path = Path(self.arena_directory.name) / "m.kv"
        self.file, arena = create_kv(self.path, GEOMETRY, TOTAL, DIGEST, 1, grows=True)
        self.memory = Extents(self.file, GEOMETRY, TOTAL, 3 * PAGE_BYTES)
        return arena

    def _reopen_arena(self) -> None:
        self.file.close()
        self.file, self.arena, _ = attach_kv(self.path, DIGEST)  # the views of the predecessor keep its lock
        self.memory = Extents(self.file, GEOMETRY, TOTAL, 3 * PAGE_BYTES)

    def teardown(self) -> None:
        self.file.close()
        self.arena_directory.cleanup()
        super().teardown()

    @rule()
    def shrink(self) -> None:
        self.manager.pool.shrink()

    @invariant()
    def reserves_what_is_used(self) -> None:
        """The table and the header agree, and the file has that much memory and no more."""
        table = self.manager.pool.table
        assert self.memory is not None
        assert table.reserved == self.memory.n_pages
        assert self.file.reserved == pages_offset(TOTAL) + table.reserved * PAGE_BYTES
        info = self.path.stat()
        assert info.st_size == HEADER_BYTES + kv_arena_bytes(GEOMETRY, TOTAL)
        assert info.st_blocks * 512 == HEADER_BYTES + self.file.reserved


class LfuRules(Rules):
    policy = "lfu"


class FifoRules(Rules):
    policy = "fifo"


@pytest.mark.parametrize("machine", [Rules, SpillRules, TtlRules, GrowingRules, LfuRules, FifoRules])
def test_rules(machine: type[Rules], monkeypatch: pytest.MonkeyPatch) -> None:
    # The whole arena is smaller than a huge page, at whose end an extent would end.
    monkeypatch.setattr(huge_pages, "HUGE_BYTES", PAGE_BYTES)
    case = machine.TestCase
    case.settings = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    case("runTest").runTest()
