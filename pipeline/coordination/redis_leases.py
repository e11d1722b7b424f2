"""What one client of a Redis server has seen of leases, and so which of them are over.  Pure.

seen    a lease is over for this client when it has seen the same entry for the lease's time.  Each renewal changes
        the entry, so that the store ends a lease at the earliest that time after its last renewal, by the clock of
        any client, whatever the server's clock does
own     the keys that this client holds.  After a loss of the server's data no other client can hold them: it may
        write them again at once
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class _Seen(NamedTuple):
    entry: bytes
    since: float
    serial: int  # when it was seen last, by the number of `SeenLeases`


class SeenLeases:
    """The leases that the server has, as far as its answers have shown them."""

    def __init__(self) -> None:
        self._seen: dict[bytes, _Seen] = {}
        self.serial = 0  # grows with each answer

    def forget(self) -> None:
        """The server has started anew, or has lost data: nothing counts that was seen before."""
        self._seen.clear()

    def see(self, lease: bytes, entry: bytes, now: float) -> None:
        """A lease has this entry."""
        self.serial += 1
        known = self._seen.get(lease)
        since = known.since if known is not None and known.entry == entry else now
        self._seen[lease] = _Seen(entry, since, self.serial)

    def see_all(self, entries: Iterable[tuple[bytes, bytes]], now: float, asked: int) -> None:
        """All leases that there were. `asked`: `serial` when the server was asked: later answers know better."""
        found = dict(entries)
        later = {lease for lease, seen in self._seen.items() if seen.serial > asked}
        for lease in self._seen.keys() - found.keys() - later:
            del self._seen[lease]
        for lease, entry in found.items():
            if lease not in later:
                self.see(lease, entry, now)

    def drop(self, lease: bytes) -> None:
        """The lease is over."""
        self._seen.pop(lease, None)

    def over(self, now: float) -> list[tuple[bytes, bytes]]:
        """The leases that are over, with their entries."""
        return [(lease, one.entry) for lease, one in self._seen.items() if now - one.since >= _ttl_s(one.entry)]


class OwnKeys:
    """The keys that this client has written with leases, and until when no other client can have them."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[float, float]] = {}  # ttl, and the end as of the last renewal
        self._keys: dict[str, str] = {}  # lease

    def granted(self, lease: str, ttl_s: float, asked: float) -> None:
        """A lease was granted, as asked for at `asked`."""
        self._leases[lease] = ttl_s, asked + ttl_s
        self._trim(asked)

    def renewed(self, lease: str, asked: float) -> None:
        """It was renewed."""
        if lease in self._leases:
            ttl_s, _ = self._leases[lease]
            self._leases[lease] = ttl_s, asked + ttl_s

    def wrote(self, key: str, lease: str) -> None:
        """A key was written with a lease, or without one, or deleted."""
        if lease in self._leases:
            self._keys[key] = lease
        else:
            self._keys.pop(key, None)

    def revoked(self, lease: str) -> None:
        """The lease is ended by its owner."""
        self._leases.pop(lease, None)
        self._keys = {key: one for key, one in self._keys.items() if one != lease}

    def holds(self, key: str, now: float) -> bool:
        """Whether no other client can hold the key now."""
        lease = self._keys.get(key)
        return lease is not None and now < self._leases[lease][1]

    def _trim(self, now: float) -> None:
        for lease in [lease for lease, (_, ends) in self._leases.items() if ends <= now]:
            self.revoked(lease)


def _ttl_s(entry: bytes) -> float:
    return int(entry.split(b" ")[0]) / 1000
