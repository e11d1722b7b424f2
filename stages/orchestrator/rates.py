"""Measured speeds, from which the terms of a score are estimated: how long a prompt's byte, a turn in the queue and the
start of an engine take.

Each is an exponentially weighted mean that begins at a default.  A sample changes it by at most `MOST_CHANGE` times,
so that one disturbed request does not steer routing.  What was predicted is compared with what happened.
"""

from __future__ import annotations

import msgspec

WEIGHT = 0.2  # of a new sample
MOST_CHANGE = 4.0  # a sample counts as at most this many times the mean, and at least its inverse
MIN_PROMPT_BYTES = 512  # of a prompt whose time is a sample: shorter ones measure overhead
PREFILL_S_PER_BYTE = 0.0005  # 500 tokens/s of 4 bytes
TURN_S = 0.05  # that one sequence ahead costs
START_S = 2.0  # of an engine whose model is in the page cache
DISK_BYTES_PER_S = 1e9
NET_BYTES_PER_S = 1e8
PEER_BYTES_PER_S = 2e8


class Mean:
    """An exponentially weighted mean, bounded in its change."""

    __slots__ = ("count", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.count = 0

    def add(self, sample: float) -> None:
        """Count a sample."""
        bounded = min(max(sample, self.value / MOST_CHANGE), self.value * MOST_CHANGE)
        self.value += WEIGHT * (bounded - self.value)
        self.count += 1


class EngineRates:
    """Of one agent and model."""

    __slots__ = ("prefill_s_per_byte", "start_s", "turn_s")

    def __init__(self) -> None:
        self.prefill_s_per_byte = Mean(PREFILL_S_PER_BYTE)
        self.turn_s = Mean(TURN_S)
        self.start_s = Mean(START_S)


class ErrorReport(msgspec.Struct, frozen=True):
    """How good the estimates were, over all requests so far."""

    count: int
    predicted_s: float  # sums
    actual_s: float
    error_s: float  # of absolute differences


class Rates:
    """Of all agents. Bounded by `keep_only` and the models that have answered: a name that was asked for adds none."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str], EngineRates] = {}
        self._unmeasured = EngineRates()
        self._count = 0
        self._predicted_s = self._actual_s = self._error_s = 0.0

    def of(self, agent_id: str, model: str) -> EngineRates:
        """The rates of a model on an agent, to be read; defaults until it was measured there."""
        return self._engines.get((agent_id, model), self._unmeasured)

    def measured(self, agent_id: str, model: str) -> EngineRates:
        """The rates of a model on an agent, to be changed."""
        found = self._engines.get((agent_id, model))
        if found is None:
            found = self._engines[agent_id, model] = EngineRates()
        return found

    def observe(
        self, agent_id: str, model: str, *, new_bytes: int, ahead: int, first_token_s: float, predicted_s: float
    ) -> None:
        """A request's first token has come. `new_bytes`: of its prompt, not cached; `ahead`: sequences before it."""
        rates = self.measured(agent_id, model)
        if ahead == 0 and new_bytes >= MIN_PROMPT_BYTES:
            rates.prefill_s_per_byte.add(first_token_s / new_bytes)
        elif ahead > 0:
            rest_s = max(0.0, first_token_s - new_bytes * rates.prefill_s_per_byte.value)
            rates.turn_s.add(rest_s / ahead)
        self._count += 1
        self._predicted_s += predicted_s
        self._actual_s += first_token_s
        self._error_s += abs(predicted_s - first_token_s)

    def observe_start(self, agent_id: str, model: str, seconds: float) -> None:
        """An engine has started with its model on the host."""
        if seconds > 0:
            self.measured(agent_id, model).start_s.add(seconds)

    def keep_only(self, agents: set[str]) -> None:
        """Forget the agents that have left."""
        self._engines = {key: rates for key, rates in self._engines.items() if key[0] in agents}

    def errors(self) -> ErrorReport:
        """How good the estimates were."""
        return ErrorReport(self._count, self._predicted_s, self._actual_s, self._error_s)
