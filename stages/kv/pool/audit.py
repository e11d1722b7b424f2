"""The kv stage's own count of its pages beside that of the page headers: do both tell the same, and does it add up?

`starling kv check` asks the running stage, which takes both counts between two frames, when nothing is under way.
"""

from __future__ import annotations

import msgspec

from stages.kv.model import ModelPages
from stages.kv.pool.headers import Count


class Books(msgspec.Struct):
    """Of one version of a model."""

    model: str
    total: int
    books: Count  # free list, pages to evict, pages that leases name
    headers: Count
    generation: int  # of the arena
    declared: bool  # the scheduler has said what it holds; until then the headers' reference counts mean nothing
    fault: str = ""  # the first rule that is broken, in words

    def problems(self) -> list[str]:
        """In words; empty when all is well."""
        found = [f"{self.model}: {self.fault}"] if self.fault else []
        counts = [("books", self.books), ("page headers", self.headers)]
        found += [
            f"{self.model}: by the {what} {count.free} free + {count.cached} cached + {count.leased} leased pages "
            f"are not {self.total}"
            for what, count in counts
            if sum(count) != self.total
        ]
        if self.declared and not found and self.books != self.headers:
            found.append(f"{self.model}: the page headers say {_words(self.headers)}, the books {_words(self.books)}")
        return found


def take(pages: ModelPages) -> Books | None:
    """None: there is no arena yet. O(pages of the arena)."""
    manager, arena = pages.manager, pages.arena
    if manager is None or arena is None:
        return None
    fault = ""
    try:
        manager.check()
    except AssertionError as error:
        fault = str(error) or "an invariant does not hold"
    return Books(
        pages.model.name,
        manager.pool.total,
        manager.count(),
        manager.pool.headers.count(),
        arena.generation,
        manager.declared,
        fault,
    )


def _words(count: Count) -> str:
    return f"{count.free} free, {count.cached} cached, {count.leased} leased"
