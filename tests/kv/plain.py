"""A plain model of the manager, without hashes and free list.

A page's name is the tuple of the salt and all tokens up to the page's end.  The state machine in test_machine.py sends
the same requests to the manager and to this model and compares their states.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Name = tuple[object, ...]


@dataclass
class Page:
    """A full page with a hash."""

    ordinal: int
    born: int
    last: int
    uses: int = 1
    refs: int = 0
    is_damaged: bool = False


@dataclass
class PlainLease:
    """A sequence's lease: `names[i]` for pages that are shared or cached, None for private ones."""

    tokens: list[int]
    salt: str
    born: int
    names: list[Name | None]
    n_final: int
    cached: int  # pages shared at the start
    prompt: int  # tokens it was acquired with
    is_new: bool = True  # acquired since the last restart


@dataclass
class Plain:
    """All pages, leases and copies on disk of one model."""

    total: int
    page_tokens: int
    policy: str
    pages: dict[Name, Page] = field(default_factory=dict)
    held: dict[str, PlainLease] = field(default_factory=dict)
    disk: dict[Name, bool] = field(default_factory=dict)  # longest unused first; True: damaged
    disk_room: int = 0

    # -------------------------------------------------------------- counts

    @property
    def cached(self) -> int:
        return sum(page.refs == 0 for page in self.pages.values())

    @property
    def leased(self) -> int:
        private = sum(name is None for held in self.held.values() for name in held.names)
        return private + sum(page.refs > 0 for page in self.pages.values())

    @property
    def free(self) -> int:
        return self.total - self.cached - self.leased

    def name(self, tokens: list[int], i: int, salt: str) -> Name:
        return (salt, *tokens[: (i + 1) * self.page_tokens])

    def victims(self) -> list[Name]:
        """Cached pages in the order of eviction."""

        def key(name: Name) -> tuple[int, ...]:
            page = self.pages[name]
            first = {"lru": (), "lfu": (page.uses,), "fifo": (page.born,)}[self.policy]
            return (*first, page.last, -page.ordinal)

        return sorted((name for name, page in self.pages.items() if page.refs == 0), key=key)

    def room(self, count: int) -> bool:
        if count > self.free + self.cached:
            return False
        while self.free < count:
            name = self.victims()[0]
            if name in self.disk:
                self.disk[name] = self.disk.pop(name)  # used since it was copied
            elif self.disk_room:
                if len(self.disk) == self.disk_room:
                    del self.disk[next(iter(self.disk))]
                self.disk[name] = self.pages[name].is_damaged
            del self.pages[name]
        return True

    def restore(self, name: Name) -> bool:
        if self.disk.pop(name, True):
            return False
        self.disk[name] = False
        return True

    def remove(self, names: list[Name]) -> None:
        """Remove these pages from the disk and from the arena, but for those that a sequence holds."""
        for name in names:
            if name in self.pages and self.pages[name].refs:
                continue
            self.pages.pop(name, None)
            self.disk.pop(name, None)

    def expire(self, before: int, idle_on_disk: list[Name]) -> None:
        """Remove pages unused since `before`, and idle copies except those of pages that stay."""
        for name in [n for n, page in self.pages.items() if page.refs == 0 and page.last < before]:
            del self.pages[name]
        for name in idle_on_disk:
            is_damaged = self.disk.pop(name)
            if name in self.pages:
                self.disk[name] = is_damaged

    # -------------------------------------------------------------- requests

    def acquire(self, who: str, tokens: list[int], want: int, salt: str, now: int) -> int | None:
        """Return the number of cached tokens; None: denied."""
        run: list[Name] = []
        for i in range((len(tokens) - 1) // self.page_tokens):
            name = self.name(tokens, i, salt)
            if name not in self.pages:
                break
            if self.pages[name].is_damaged and self.pages[name].refs == 0:
                del self.pages[name]
                break
            run.append(name)
        on_disk: list[Name] = []
        for i in range(len(run), (len(tokens) - 1) // self.page_tokens):
            name = self.name(tokens, i, salt)
            if name not in self.disk:
                break
            on_disk.append(name)
        needed = max(-(-want // self.page_tokens), len(run) + len(on_disk))
        for name in run:
            self.pages[name].refs += 1
        if not self.room(needed - len(run)):
            self._release_ref(list(run), now + 1)
            return None
        for name in run:
            self.pages[name].uses += 1
            self.pages[name].last = now
        names: list[Name | None] = list(run)
        for name in on_disk:
            if not self.restore(name):
                break
            names.append(name if name not in self.pages else None)
            self.pages.setdefault(name, Page(len(names) - 1, now, now, refs=1))
        cached = len(names)
        names += [None] * (needed - cached)
        self.held[who] = PlainLease(tokens, salt, now, names, cached, cached, len(tokens))
        return cached * self.page_tokens

    def extend(self, who: str, want: int) -> bool:
        held = self.held[who]
        missing = max(0, -(-want // self.page_tokens) - len(held.names))
        if not self.room(missing):
            return False
        held.names += [None] * missing
        return True

    def commit(self, who: str, n_tokens: int, leased_at: dict[tuple[str, int], int]) -> None:
        held = self.held[who]
        full = min(n_tokens // self.page_tokens, len(held.names))
        for i in range(held.n_final, full):
            name = self.name(held.tokens, i, held.salt)
            if name not in self.pages:
                self.pages[name] = Page(i, held.born, leased_at[who, i], refs=1)
                held.names[i] = name
        held.n_final = max(held.n_final, full)

    def release(self, who: str, now: int) -> None:
        self._release_ref([name for name in self.held.pop(who).names if name is not None], now)

    def _release_ref(self, names: list[Name], now: int) -> None:
        for name in names:
            self.pages[name].refs -= 1
            self.pages[name].last = now
