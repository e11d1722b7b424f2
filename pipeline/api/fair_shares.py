"""Bounds on requests, connections and body bytes: in total, and for each principal. Pure.

A principal is whom a bound applies to: a tenant where API keys are configured, otherwise a client's address.

    total      what the server holds at once
    share      what one principal holds at once, less than the total, so that no principal can use up the server
    reserve    the last part of the total: only for a principal that holds no more than `first` with the new amount
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Callable
from enum import Enum

_IPV6_HOST_BITS = 64  # one host chooses these bits freely


class Refusal(Enum):
    """Which bound refuses an amount."""

    SHARE = "share"
    TOTAL = "total"


class FairShares:
    """One resource. Amounts are integers: requests, connections or bytes."""

    def __init__(
        self,
        total: int,
        share: int,
        reserve: int,
        first: int = 1,
        share_of: Callable[[str], int] | None = None,
    ) -> None:
        """`share_of` returns the share of a principal, if not all have `share`."""
        self.total = total
        self.share = share
        self.share_of = share_of or (lambda principal: share)
        self.held = 0  # by all principals
        self._reserve = reserve
        self._first = first
        self._held_by: Counter[str] = Counter()

    def held_by(self, principal: str) -> int:
        """What the principal holds."""
        return self._held_by[principal]

    def refusal(self, principal: str, amount: int = 1) -> Refusal | None:
        """The bound that refuses the amount now; None if it can be taken."""
        would_hold = self._held_by.get(principal, 0) + amount
        free = self.total - self.held - amount
        if free < 0:
            return Refusal.TOTAL
        if would_hold > self.share_of(principal):
            return Refusal.SHARE
        return Refusal.TOTAL if free < self._reserve and would_hold > self._first else None

    def take(self, principal: str, amount: int = 1) -> None:
        """Count an amount, whatever the bounds are; see `refusal`."""
        self.held += amount
        self._held_by[principal] = self._held_by.get(principal, 0) + amount

    def give_back(self, principal: str, amount: int = 1) -> None:
        """Return an amount that was taken."""
        self.held -= amount
        self._held_by[principal] -= amount
        if self._held_by[principal] <= 0:
            del self._held_by[principal]

    def taken(self, principal: str, amount: int = 1) -> Taken:
        """Hold an amount meanwhile."""
        return Taken(self, principal, amount)


class Taken:
    """A context manager that holds an amount. Every request enters one, so no generator."""

    __slots__ = ("_amount", "_principal", "_shares")

    def __init__(self, shares: FairShares, principal: str, amount: int) -> None:
        self._shares = shares
        self._principal = principal
        self._amount = amount

    def __enter__(self) -> None:
        self._shares.take(self._principal, self._amount)

    def __exit__(self, *exception: object) -> None:
        self._shares.give_back(self._principal, self._amount)


@functools.lru_cache(4096)
def address_principal(address: str) -> str:
    """Return the principal of a client's address. All addresses of an IPv6 network of 64 bits are one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> _IPV6_HOST_BITS << _IPV6_HOST_BITS, 128 - _IPV6_HOST_BITS)))
