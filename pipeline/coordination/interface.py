"""What every coordination store does: a map of keys to small values with revisions, leases and watches.

    revision     of the whole store: every transaction that changes something has the next one.  A value's revision is
                 that of the transaction that wrote it; 0 stands for "no value".
    transact     all changes or none: applied if each condition's key has the revision that it names.  Compare-and-swap
                 is a transaction with one condition.
    lease        keys written with a lease are deleted when it ends.  It ends `ttl_s` after its last renewal, by the
                 store's clock.
    watch        first a snapshot, then every change in order of revision, none twice, none left out.  If the store has
                 forgotten changes that the watcher missed (compaction, a long outage), it gets a new snapshot.

A lease that has ended for the store may still seem valid to a slow holder: a holder must stop by its own clock before
(election.py), and fences what it writes by a condition on a key of its lease.

Errors: `StorageUnavailable` (a retry may help; whether a transaction was applied is then unknown), `ConfigError`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Self

from pipeline.errors import InvalidRequest

MAX_KEY_CHARACTERS = 512
MAX_VALUE_BYTES = 256 << 10
MAX_CHANGES = 64  # of a transaction, and conditions
MIN_TTL_S, MAX_TTL_S = 0.5, 86_400.0
_KEY = re.compile(r"[A-Za-z0-9._@:+-]+(/[A-Za-z0-9._@:+-]+)*")


class Item(NamedTuple):
    """A key with its value."""

    key: str
    value: bytes
    revision: int  # of the transaction that wrote it


class Condition(NamedTuple):
    """The key's value has this revision; 0: it has no value."""

    key: str
    revision: int


class Change(NamedTuple):
    """Write a value, with a lease if one is given; or delete the key (`value` None)."""

    key: str
    value: bytes | None
    lease: str = ""


class Event(NamedTuple):
    """What a watcher learns of a key. `value` None: it was deleted."""

    key: str
    value: bytes | None
    revision: int


class Update(NamedTuple):
    """Events in order. A snapshot has all values, and replaces what the watcher knew."""

    revision: int  # that the watcher has seen now
    events: tuple[Event, ...]
    is_snapshot: bool


class CoordinationStore(ABC):
    """A store. A context manager, which closes it."""

    @abstractmethod
    async def get(self, key: str) -> Item | None:
        """The value of a key; None without one."""

    @abstractmethod
    async def scan(self, prefix: str) -> tuple[list[Item], int]:
        """The values of all keys that begin with `prefix`, sorted, and the store's revision at that moment."""

    @abstractmethod
    async def transact(self, conditions: Sequence[Condition], changes: Sequence[Change]) -> int | None:
        """Apply the changes if every condition holds; the revision, or None if one does not hold.

        Also None if a change names a lease that has ended.  Raises `InvalidRequest` for what no store would accept.
        """

    @abstractmethod
    async def grant(self, ttl_s: float) -> str:
        """A new lease."""

    @abstractmethod
    async def renew(self, lease: str) -> bool:
        """Let a lease last for another `ttl_s`; false if it has ended."""

    @abstractmethod
    async def revoke(self, lease: str) -> None:
        """End a lease now. Idempotent."""

    @abstractmethod
    def watch(self, prefix: str, after: int = 0) -> AsyncIterator[Update]:
        """Updates of keys that begin with `prefix`, without end. `after`: the revision seen already; 0: a snapshot."""

    async def put(self, key: str, value: bytes, lease: str = "") -> int | None:
        """Write a value unconditionally; the revision, or None if the lease has ended."""
        return await self.transact((), (Change(key, value, lease),))

    async def swap(self, key: str, revision: int, value: bytes | None, lease: str = "") -> int | None:
        """Write or delete a value if it has `revision` (0: none); the new revision, or None."""
        return await self.transact((Condition(key, revision),), (Change(key, value, lease),))

    async def close(self) -> None:  # noqa: B027  (a store without connections has nothing to close)
        """Release connections and files. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def check_transaction(conditions: Sequence[Condition], changes: Sequence[Change]) -> None:
    """Raise `InvalidRequest` for a transaction that exceeds a bound, or names a key twice."""
    if not changes or len(changes) > MAX_CHANGES or len(conditions) > MAX_CHANGES:
        raise InvalidRequest(f"{len(changes)} changes and {len(conditions)} conditions, expected 1 to {MAX_CHANGES}")
    for key in [one.key for one in conditions] + [one.key for one in changes]:
        if len(key) > MAX_KEY_CHARACTERS or not _KEY.fullmatch(key):
            raise InvalidRequest(f"{key[:80]!r} is not a key: up to {MAX_KEY_CHARACTERS} letters, digits, ._@:+- and /")
    if len({change.key for change in changes}) != len(changes):
        raise InvalidRequest("a key is changed twice in one transaction; its order would be undefined")
    for change in changes:
        if change.value is not None and len(change.value) > MAX_VALUE_BYTES:
            raise InvalidRequest(f"{change.key}: {len(change.value):,} bytes, expected at most {MAX_VALUE_BYTES:,}")


def check_ttl(ttl_s: float) -> None:
    """Raise `InvalidRequest` for a time that is no lease's."""
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl_s is {ttl_s}, expected {MIN_TTL_S} to {MAX_TTL_S:,.0f}")
