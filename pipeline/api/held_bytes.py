"""Bytes of request or response bodies that are held in memory, counted for a tenant (or address) and in total."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.api.fair_shares import FairShares
from pipeline.config.schema import ServerConfig
from pipeline.errors import Overloaded

UNCOUNTED_BYTES = 64 << 10  # of an answer; one for each request in flight is 16 MiB at a server


def body_shares(server: ServerConfig, is_alone: Callable[[], bool] = lambda: False) -> FairShares:
    """The bounds on the bytes of request bodies: half of `server.body_buffer_mb` for one principal.

    is_alone: whether there is one principal, which then may have all but the reserve.
    """
    total, body = server.body_buffer_mb << 20, server.max_body_mb << 20
    return FairShares(total, total // 2, min(body, total // 2), body, _half_or_all(total, is_alone))


def answer_shares(server: ServerConfig, is_alone: Callable[[], bool] = lambda: False) -> FairShares:
    """The bounds on the bytes of answers that clients have yet to read: half of `server.response_buffer_mb` for one.

    is_alone: as of `body_shares`.
    """
    total = server.response_buffer_mb << 20
    return FairShares(total, total // 2, total // 4, total // 8, _half_or_all(total, is_alone))


def _half_or_all(total: int, is_alone: Callable[[], bool]) -> Callable[[str], int]:
    return lambda principal: total if is_alone() else total // 2


class HeldBytes:
    """The bytes of one body; a context manager. Without bounds nothing is counted."""

    __slots__ = ("_bounds", "_bytes", "_principal", "_what")

    def __init__(self, bounds: FairShares | None, principal: str, what: str) -> None:
        """`what`: of the bytes that are too many, with the configuration key."""
        self._bounds = bounds
        self._principal = principal
        self._what = what
        self._bytes = 0

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    @property
    def count(self) -> int:
        """The bytes so far."""
        return self._bytes

    def add(self, n: int) -> None:
        """Count more bytes. Raises `Overloaded`; a body is not refused while there are no others."""
        if self._bounds is None:
            return
        bounds = self._bounds
        if bounds.held > self._bytes and bounds.refusal(self._principal, n) is not None:
            raise Overloaded(
                f"too many bytes {self._what}: at most {bounds.share_of(self._principal) >> 20} MiB for one client, "
                f"{bounds.total >> 20} MiB in all; try again",
                retry_after_s=1.0,
            )
        bounds.take(self._principal, n)
        self._bytes += n

    def give_back(self) -> None:
        """They are held no longer."""
        if self._bounds is not None and self._bytes:
            self._bounds.give_back(self._principal, self._bytes)
        self._bytes = 0
