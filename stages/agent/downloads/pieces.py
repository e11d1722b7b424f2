"""State of each piece of a download. Pure.

    missing -> in flight -> present
       ^----------'  failed

A piece may be in flight twice: at the end of a download an idle request repeats the oldest piece from another source.
`missing + in flight + present == total` after every operation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PieceMap:
    """The pieces `0 .. total - 1`, handed out in order: the `.bin` is in order of use."""

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

    def begin(self, piece: int) -> None:
        """A request for a piece starts."""
        if piece not in self.in_flight:
            assert heapq.heappop(self._missing) == piece, "pieces are requested in order"
        self.in_flight[piece] = self.in_flight.get(piece, 0) + 1

    def repeatable(self) -> int | None:
        """The oldest piece with a single request, once all others are present or in flight."""
        if self._missing:
            return None
        return next((piece for piece, requests in self.in_flight.items() if requests == 1), None)

    def failed(self, piece: int) -> None:
        """A request has failed: without another one the piece is missing again."""
        if piece in self.present:
            return
        self.in_flight[piece] -= 1
        if not self.in_flight[piece]:
            del self.in_flight[piece]
            heapq.heappush(self._missing, piece)

    def arrived(self, piece: int) -> bool:
        """A piece is verified and written; whether it is the first time."""
        if piece in self.present:
            return False
        del self.in_flight[piece]
        self.present.add(piece)
        return True
