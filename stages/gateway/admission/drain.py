"""Admission that has been stopped on purpose: of everything, or of a model. Pure; the clock is given.

A drain refuses new requests at once, lets those in flight go on for its time, and says when the rest must
be ended.  It stays until it is lifted.  `ALL` names the whole server; no model can have that name in a
command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.errors import StarlingError

ALL = "all"
RETRY_AFTER_S = 5.0  # what a refused request is told


class Drain(msgspec.Struct):
    """Of one target."""

    target: str  # a model, or ALL
    timeout_s: float
    deadline: float  # of the injected clock: when the rest is ended
    is_kept: bool  # a gateway that starts again drains as well
    ended: int = 0  # requests that were not finished in time


class Drains:
    """What is drained now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._drains: dict[str, Drain] = {}

    @property
    def targets(self) -> list[str]:
        return sorted(self._drains)

    @property
    def kept(self) -> dict[str, float]:
        """Target and time (s) of those that a restart of the gateway must not lift."""
        return {drain.target: drain.timeout_s for drain in self._drains.values() if drain.is_kept}

    def begin(self, target: str, timeout_s: float, is_kept: bool = True) -> None:
        """Stop admission; a second call sets the time anew, and keeps what was to be kept."""
        before = self._drains.get(target)
        is_kept = is_kept or (before is not None and before.is_kept)
        self._drains[target] = Drain(target, timeout_s, self._clock() + timeout_s, is_kept)

    def lift(self, target: str) -> list[str]:
        """Take requests again; what had been drained of it. `ALL` lifts everything."""
        lifted = [name for name in self.targets if target in (ALL, name)]
        for name in lifted:
            del self._drains[name]
        return lifted

    def refusal(self, model: str = "") -> StarlingError | None:
        """Why a request for `model` ("": for whatever it may be) is not taken; None when it is."""
        for target in (ALL, model):
            if target in self._drains:
                return StarlingError(
                    "DRAINING",
                    f"{_what(target)} is being drained and takes no more requests; try again",
                    retry_after_s=RETRY_AFTER_S,
                )
        return None

    def reason(self, model: str = "") -> str:
        """For readiness: "" when requests for `model` are taken."""
        return next((f"{_what(target)} is drained" for target in (ALL, model) if target in self._drains), "")

    def due(self) -> list[Drain]:
        """Drains whose time is up: whatever of theirs is still in flight is to be ended."""
        now = self._clock()
        return [drain for drain in self._drains.values() if now >= drain.deadline]

    def report(self) -> dict[str, Any]:
        """Of each target: seconds left for those in flight, and how many were ended since."""
        now = self._clock()
        return {
            name: {"left_s": round(max(0.0, drain.deadline - now), 1), "ended": drain.ended}
            for name, drain in sorted(self._drains.items())
        }


def too_late(drain: Drain) -> StarlingError:
    """What a request is told that was not finished in time."""
    return StarlingError(
        "DRAINING",
        f"{_what(drain.target)} was drained, and this was not finished within {drain.timeout_s:g} s; send it again",
        retry_after_s=RETRY_AFTER_S,
    )


def _what(target: str) -> str:
    return "the server" if target == ALL else f"model {target}"
