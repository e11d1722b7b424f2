"""Who holds which page: the free list and the reference counts. Knows nothing of tokens or bytes.

Every page is in one of four states, and the counts are kept so that

    free + cached + leased == total

    FREE    on the free list
    LEASED  held by `refs[page] > 0` sequences
    CACHED  held by nobody, but its contents have a name and may be wanted again
    LIMBO   after a restart: possibly held by a sequence not yet declared (counted as leased)
"""

from __future__ import annotations

FREE, LEASED, CACHED, LIMBO = range(4)


class Allocator:
    """`total` pages, all free. Pages are given out lowest first, so that a run reads in order."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.refs = [0] * total
        self.states = bytearray(total)
        self._free = list(range(total - 1, -1, -1))
        self.cached = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leased(self) -> int:
        return self.total - len(self._free) - self.cached

    def state(self, page: int) -> int:
        return self.states[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, each held once. The caller has seen to it that there are so many."""
        if count == 0:
            return []
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} are free")
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self.refs[page] = 1
            self.states[page] = LEASED
        return pages

    def share(self, page: int) -> int:
        """One more sequence holds a leased or cached page. Returns how many do."""
        state = self.states[page]
        if state == CACHED:
            self.cached -= 1
            self.states[page] = LEASED
            self.refs[page] = 1
            return 1
        if state != LEASED:
            raise ValueError(f"page {page} is neither leased nor cached")
        self.refs[page] = held = self.refs[page] + 1
        return held

    def drop(self, page: int, keep: bool) -> int:
        """One sequence fewer. The last one leaves it CACHED (`keep`) or FREE. Returns the rest."""
        if self.states[page] != LEASED:
            raise ValueError(f"page {page} is not leased")
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if keep:
                self.states[page] = CACHED
                self.cached += 1
            else:
                self.states[page] = FREE
                self._free.append(page)
        return self.refs[page]

    def forget(self, page: int) -> None:
        """A cached page, or one in limbo, becomes free."""
        if self.states[page] == CACHED:
            self.cached -= 1
        elif self.states[page] != LIMBO:
            raise ValueError(f"page {page} is neither cached nor in limbo")
        self.states[page] = FREE
        self._free.append(page)

    # -------------------------------------------------------------- after a restart

    def adopt(self, cached: set[int], limbo: set[int]) -> None:
        """Take over what the headers say; every other page is free. Only on a fresh allocator."""
        for page in cached:
            self.states[page] = CACHED
        for page in limbo:
            self.states[page] = LIMBO
        self.cached = len(cached)
        self._free = [p for p in range(self.total - 1, -1, -1) if self.states[p] == FREE]

    def claim(self, page: int) -> None:
        """A page in limbo is held by a sequence after all."""
        if self.states[page] != LIMBO:
            raise ValueError(f"page {page} is not in limbo")
        self.states[page] = LEASED
        self.refs[page] = 1

    def doubt(self, page: int) -> None:
        """A cached page is in limbo after all."""
        if self.states[page] != CACHED:
            raise ValueError(f"page {page} is not cached")
        self.cached -= 1
        self.states[page] = LIMBO

    def limbo(self) -> list[int]:
        return [page for page, state in enumerate(self.states) if state == LIMBO]

    # -------------------------------------------------------------- the law

    def check(self) -> None:
        """Raises `AssertionError` naming the page or the count that is wrong. O(total)."""
        tally = [0, 0, 0, 0]
        for page, state in enumerate(self.states):
            tally[state] += 1
            assert (self.refs[page] > 0) == (state == LEASED), f"page {page}: refs {self.refs[page]}"
        assert len(set(self._free)) == len(self._free), "a page is twice on the free list"
        assert all(self.states[page] == FREE for page in self._free), "a held page is on the free list"
        assert tally[FREE] == self.free, f"{tally[FREE]} pages are free, {self.free} on the list"
        assert tally[CACHED] == self.cached, f"{tally[CACHED]} pages are cached, {self.cached} counted"
        assert self.free + self.cached + self.leased == self.total
