"""State of each piece of a download. Pure.

    missing -> in flight -> present
       ^----------'  failed

A piece may be in flight twice: one that takes too long is asked from another source as well.
`missing + in flight + present == total` after every operation.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class PieceMap:
    """The pieces `0 .. total - 1`. `missing` has them in order: the `.bin` is in order of use."""

    def __init__(self, total: int, present: Iterable[int] = ()) -> None:
        self.total = total
        self.present = set(present)
        self.in_flight: dict[int, int] = {}  # piece -> requests; oldest first
        self._missing = [piece for piece in range(total) if piece not in self.present]

    @property
    def n_missing(self) -> int:
        """Pieces without a request."""
        return len(self._missing)

    @property
    def is_complete(self) -> bool:
        """Whether every piece is present."""
        return len(self.present) == self.total

    def first_missing(self) -> int | None:
        """The first piece without a request; it stays missing until `begin`."""
        return self._missing[0] if self._missing else None

    def missing(self, most: int) -> list[int]:
        """The first pieces without a request, in order."""
        return self._missing[:most]

    def begin(self, piece: int) -> None:
        """A request for a piece starts."""
        if piece not in self.in_flight:
            at = bisect.bisect_left(self._missing, piece)
            assert self._missing[at : at + 1] == [piece], "a piece is requested that is not missing"
            del self._missing[at]
        self.in_flight[piece] = self.in_flight.get(piece, 0) + 1

    def repeatable(self) -> list[int]:
        """The pieces with a single request, oldest first."""
        return [piece for piece, requests in self.in_flight.items() if requests == 1]

    def failed(self, piece: int) -> None:
        """A request has failed: without another one the piece is missing again."""
        if piece in self.present:
            return
        self.in_flight[piece] -= 1
        if not self.in_flight[piece]:
            del self.in_flight[piece]
            bisect.insort(self._missing, piece)

    def arrived(self, piece: int) -> bool:
        """A piece is verified and written; whether it is the first time."""
        if piece in self.present:
            return False
        del self.in_flight[piece]
        self.present.add(piece)
        return True
