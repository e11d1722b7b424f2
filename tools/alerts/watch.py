"""Waits until alerts fire and resolve, and keeps count of those that fired although no fault made them due."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from tools.alerts.prometheus import Prometheus

POLL_S = 0.25


class AlertError(Exception):
    """An alert did not fire, did not resolve, or fired without a cause."""


class Watch:
    """The alerts of one Prometheus. `due`: those that a fault so far has made due."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self.due: set[str] = set()

    def wait_firing(self, names: Collection[str], timeout_s: float, act: Callable[[], object] | None = None) -> float:
        """Wait until each of `names` has fired; returns the seconds. `act` is called repeatedly meanwhile.

        Raises `AlertError` for one that does not fire in time, and for any that is not due.
        """
        self.due.update(names)
        begun = time.monotonic()
        missing = set(names)
        while missing:
            missing -= set(self._firing())
            if missing and time.monotonic() - begun > timeout_s:
                raise AlertError(f"{_list(missing)} did not fire within {timeout_s:.0f} s")
            if missing and act is not None:
                act()
            time.sleep(POLL_S)
        return time.monotonic() - begun

    def wait_resolved(self, names: Collection[str], timeout_s: float) -> float:
        """Wait until none of `names` fires; returns the seconds. Raises `AlertError`."""
        begun = time.monotonic()
        while left := set(names) & set(self._firing()):
            if time.monotonic() - begun > timeout_s:
                raise AlertError(f"{_list(left)} did not resolve within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        return time.monotonic() - begun

    def _firing(self) -> dict[str, dict[str, str]]:
        firing = self._prometheus.firing()
        if wrong := {name: labels for name, labels in firing.items() if name not in self.due}:
            raise AlertError(f"fired without a fault that makes it due: {wrong}")
        return firing


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
