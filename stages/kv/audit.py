"""Two counts of the pages of an arena, by the page table and by the page headers, which must agree and add up.

`starling kv check` requests an audit from the running stage, which takes both counts between two frames.
"""

from __future__ import annotations

import msgspec

from stages.kv.model import ModelPages
from stages.kv.pool.page_headers import PageCounts


class PageAudit(msgspec.Struct):
    """The audit of one version of a model."""

    model: str
    total: int
    page_table: PageCounts  # free list, eviction order, pages of leases
    headers: PageCounts
    generation: int  # of the arena
    is_reconciled: bool  # False: the scheduler has not named its leases, and reference counts in headers are not valid
    violation: str = ""  # the first invariant that does not hold

    def problems(self) -> list[str]:
        """One sentence for each problem."""
        found = [f"{self.model}: {self.violation}"] if self.violation else []
        counts = [("page table", self.page_table), ("page headers", self.headers)]
        found += [
            f"{self.model}: by the {ledger} {count.free} free + {count.cached} cached + {count.leased} leased pages "
            f"are not {self.total}"
            for ledger, count in counts
            if sum(count) != self.total
        ]
        if self.is_reconciled and not found and self.page_table != self.headers:
            found.append(
                f"{self.model}: the page headers say {_text(self.headers)}, the page table {_text(self.page_table)}"
            )
        return found


def audit(pages: ModelPages) -> PageAudit | None:
    """Count the pages of a model; None before its arena is open. O(pages of the arena)."""
    manager, arena = pages.manager, pages.arena
    if manager is None or arena is None:
        return None
    violation = ""
    try:
        manager.check()
    except AssertionError as error:
        violation = str(error) or "an invariant does not hold"
    return PageAudit(
        pages.model.name,
        manager.pool.total,
        manager.count(),
        manager.pool.headers.count(),
        arena.generation,
        manager.is_reconciled,
        violation,
    )


def _text(count: PageCounts) -> str:
    return f"{count.free} free, {count.cached} cached, {count.leased} leased"
