"""Bytes of request or response bodies that are held in memory, counted for a tenant (or address) and in total."""

from __future__ import annotations

from pipeline.api.fair_shares import FairShares
from pipeline.errors import Overloaded


class HeldBytes:
    """The bytes of one body; a context manager. Without bounds nothing is counted."""

    def __init__(self, bounds: FairShares | None, principal: str, what: str) -> None:
        """`what`: of the bytes that are too many, with the configuration key."""
        self._bounds = bounds
        self._principal = principal
        self._what = what
        self._bytes = 0

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bounds is not None:
            self._bounds.give_back(self._principal, self._bytes)
        self._bytes = 0

    def add(self, n: int) -> None:
        """Count more bytes. Raises `Overloaded`; a body is not refused while there are no others."""
        if self._bounds is None:
            return
        if self._bounds.held > self._bytes and self._bounds.refusal(self._principal, n) is not None:
            raise Overloaded(f"too many bytes {self._what}; try again", retry_after_s=1.0)
        self._bounds.take(self._principal, n)
        self._bytes += n
