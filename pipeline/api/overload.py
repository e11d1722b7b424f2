"""Whether something that readiness counts is full, for load balancers, which shall not send and withhold in turns."""

from __future__ import annotations


class Overload:
    """Full from its bound on, until a tenth of it is free again (of a small bound: one)."""

    def __init__(self) -> None:
        self._is_full = False

    def observe(self, count: int, most: int) -> bool:
        """Whether it is full. Call with each answer about readiness: it counts what it was then."""
        free = max(1, most // 10)
        self._is_full = count >= most or (self._is_full and count > most - free)
        return self._is_full
