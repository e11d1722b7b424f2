"""When models were used last, and how long they stay loaded. Pure; the clock is injected.

A request may say how long its model stays (`keep_alive`).  That holds for its tenant: a model stays until the time of
each tenant that has used it is over, so that no tenant shortens another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

MAX_TENANTS = 1024  # remembered for a model; beyond that the one whose time ends first is forgotten


class _Hold(NamedTuple):
    """What a tenant's last request for a model asks for."""

    used_at: float  # s of the clock
    keep_alive_s: float


class ModelUse:
    """One per gateway. `clock` is monotonic, `wall` is s since 1970."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._holds: dict[str, dict[str, _Hold]] = {}  # by model and tenant; "": no request yet
        self._versions: dict[str, str] = {}  # by model: the version that the holds are of
        self._last_used: dict[str, float] = {}  # by model, s since 1970; kept when it is unloaded

    def loaded(self, model: str, version: str, keep_alive_s: float) -> None:
        """The version is loaded: without any request it stays for that time. No effect if it is known."""
        if self._versions.get(model) != version:
            self._versions[model] = version
            self._holds[model] = {"": _Hold(self._clock(), keep_alive_s)}

    def used(self, model: str, version: str, tenant: str, keep_alive_s: float) -> None:
        """A request of the tenant for the model has begun or ended, while that version of it is served."""
        self.loaded(model, version, keep_alive_s)
        holds = self._holds[model]
        holds.pop("", None)
        holds[tenant] = _Hold(self._clock(), keep_alive_s)
        self.asked(model)
        if len(holds) > MAX_TENANTS:
            del holds[min(holds, key=lambda name: _end(holds[name]))]

    def asked(self, model: str) -> None:
        """A request for the model has begun or ended, whether it is loaded or not."""
        self._last_used[model] = self._wall()

    def unloaded(self, model: str) -> None:
        """The model is not loaded any more."""
        self._holds.pop(model, None)
        self._versions.pop(model, None)

    def last_used(self, model: str) -> float | None:
        """When a request for the model began or ended last, s since 1970; None: not since this process started."""
        return self._last_used.get(model)

    def idle_since(self, model: str) -> float:
        """When the model was loaded or used last, s of the clock."""
        return max((hold.used_at for hold in self._holds.get(model, {}).values()), default=-math.inf)

    def end(self, model: str) -> float:
        """When an idle model is to be unloaded, s of the clock; infinite: never."""
        return max((_end(hold) for hold in self._holds.get(model, {}).values()), default=math.inf)


def _end(hold: _Hold) -> float:
    return hold.used_at + hold.keep_alive_s
