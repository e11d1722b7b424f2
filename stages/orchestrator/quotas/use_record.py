"""The value of `quotas/HASH` in the coordination store: what all orchestrators have used of a tenant's or key's limits.

Counts only grow within their period, so that of two records the one with the greater count knows more, whatever the
order in which they arrive.  Each orchestrator names the last batch of its own that a record contains: when the answer
of the store to a write was lost, the record shows whether the write was applied.
"""

from __future__ import annotations

import hashlib

import msgspec

from pipeline.api.quotas import TOTAL
from shm.decoding import DECODE_ERRORS

QUOTAS = "quotas/"  # prefix of the keys
MAX_WRITERS = 16  # whose last batch is known; orchestrators that have written longest ago are left out
MAX_USED = 1e15


class Use(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One counter."""

    used: float  # requests or tokens; per minute: since the record was made
    day: int = 0  # of a daily counter, since 1970
    # Of a bucket, for an orchestrator that starts: its limit, what was left of it, and when, s since 1970.
    limit: int = 0
    left: float = 0.0
    at: float = 0.0

    @property
    def order(self) -> tuple[int, float]:
        """Of two states of a counter the greater one is the later one."""
        return self.day, self.used


class UseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a key."""

    counters: dict[str, Use] = {}  # by UNIT/PERIOD
    writers: dict[str, int] = {}  # number of the last batch, by orchestrator
    at: float = 0.0  # s since 1970 of the last write

    @property
    def has_total(self) -> bool:
        """Whether a counter never starts again: such a record is never forgotten."""
        return any(name.endswith("/" + TOTAL) for name in self.counters)

    def with_writer(self, writer: str, batch: int) -> dict[str, int]:
        """`writers` after another batch of `writer`."""
        others = [(name, number) for name, number in self.writers.items() if name != writer]
        return dict([*others[-(MAX_WRITERS - 1) :], (writer, batch)])


def use_key(whose: str) -> str:
    """The key of a tenant's or key's record: a hash, because names of tenants are no keys of a store."""
    digest = hashlib.blake2b(whose.encode("utf-8", "surrogatepass"), digest_size=16, person=b"fleet-quotas")
    return QUOTAS + digest.hexdigest()


def encode(record: UseRecord) -> bytes:
    """The value."""
    return msgspec.json.encode(record)


def decode(value: bytes) -> UseRecord | None:
    """The record; None for a value that is none."""
    try:
        record = msgspec.json.decode(value, type=UseRecord)
    except DECODE_ERRORS:
        return None
    for use in record.counters.values():
        if not (0 <= use.used <= MAX_USED and abs(use.left) <= MAX_USED and 0 <= use.limit <= MAX_USED):
            return None
    return record
