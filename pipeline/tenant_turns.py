"""Items that wait, by tenant: tenants take turns, and the items of one tenant leave in the order in which they came.

Used where one process or thread handles what several tenants have sent: between two items of a tenant that waits, each
other tenant has at most one.  Bounds are the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TenantTurns(Generic[Item]):
    """A queue for each tenant that has waiting items, the one whose turn it is first."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Item]] = {}  # by tenant, in the order of turns; none is empty

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, tenant: str) -> Sequence[Item]:
        """The waiting items of a tenant."""
        return self._waiting.get(tenant, ())

    def longest(self) -> Sequence[Item]:
        """The waiting items of the tenant that has most; empty if none wait."""
        return max(self._waiting.values(), key=len, default=())

    def add(self, tenant: str, item: Item) -> None:
        """Add an item behind those of its tenant. A tenant without waiting items gets the last turn."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> Item:
        """Take out the next item of the tenant whose turn it is. Some item must wait."""
        tenant = next(iter(self._waiting))
        items = self._waiting.pop(tenant)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items  # behind the others
        return item

    def remove(self, tenant: str, item: Item) -> None:
        """Take out a waiting item."""
        items = self._waiting[tenant]
        items.remove(item)
        if not items:
            del self._waiting[tenant]
