"""Drains: an operator stops admission, of all models or of one. Pure; the clock is injected.

A drained target rejects new requests at once.  Requests in flight may finish until the drain's deadline, then they are
ended.  A drain stays until it is lifted.  `ALL` names the whole server; no model can have that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.errors import StarlingError

ALL = "all"
RETRY_AFTER_S = 5.0  # for rejected requests


class ActiveDrain(msgspec.Struct):
    """The drain of one target."""

    target: str  # a model, or ALL
    timeout_s: float
    deadline: float  # of the injected clock: remaining requests are ended then
    is_persistent: bool  # survives a restart of the gateway
    is_exit: bool = False  # the gateway exits after it: what its successor continues is not ended
    ended: int = 0  # requests that did not finish in time


class Drains:
    """All drains in force, by target."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._drains: dict[str, ActiveDrain] = {}

    @property
    def targets(self) -> list[str]:
        """The drained targets, sorted."""
        return sorted(self._drains)

    @property
    def persistent(self) -> dict[str, float]:
        """Target and timeout (s) of the drains that survive a restart of the gateway."""
        return {drain.target: drain.timeout_s for drain in self._drains.values() if drain.is_persistent}

    def begin(self, target: str, timeout_s: float, is_persistent: bool = True, *, is_exit: bool = False) -> None:
        """Start a drain; a second call resets the timeout, and a persistent drain stays persistent."""
        before = self._drains.get(target)
        is_persistent = is_persistent or (before is not None and before.is_persistent)
        self._drains[target] = ActiveDrain(target, timeout_s, self._clock() + timeout_s, is_persistent, is_exit)

    def lift(self, target: str) -> list[str]:
        """End the drain of `target`, or all drains for `ALL`; return the targets that were drained."""
        lifted = [name for name in self.targets if target in (ALL, name)]
        for name in lifted:
            del self._drains[name]
        return lifted

    def rejection(self, model: str = "") -> StarlingError | None:
        """Return the error for a request for `model` ("": for any model), None if it is not drained."""
        for target in (ALL, model):
            if target in self._drains:
                return StarlingError(
                    "DRAINING",
                    f"{_name(target)} is draining and accepts no new requests; try again later",
                    retry_after_s=RETRY_AFTER_S,
                )
        return None

    def reason(self, model: str = "") -> str:
        """Return why requests for `model` are rejected, for readiness; "" if they are not."""
        return next((f"{_name(target)} is drained" for target in (ALL, model) if target in self._drains), "")

    def due(self) -> list[ActiveDrain]:
        """Return the drains past their deadline; their remaining requests are to be ended."""
        now = self._clock()
        return [drain for drain in self._drains.values() if now >= drain.deadline]

    def report(self) -> dict[str, Any]:
        """Return for each target the seconds left for its requests and the number of requests ended."""
        now = self._clock()
        return {
            name: {"left_s": round(max(0.0, drain.deadline - now), 1), "ended": drain.ended}
            for name, drain in sorted(self._drains.items())
        }


def drain_timeout(drain: ActiveDrain) -> StarlingError:
    """Return the error for a request that did not finish before the drain's deadline."""
    return StarlingError(
        "DRAINING",
        f"{_name(drain.target)} was drained, and this request did not finish within "
        f"{drain.timeout_s:g} s; send it again",
        retry_after_s=RETRY_AFTER_S,
    )


def _name(target: str) -> str:
    return "the server" if target == ALL else f"model {target}"
