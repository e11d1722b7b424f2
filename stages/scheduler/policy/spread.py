"""Spread: how far measured times exceed predicted ones, for the time budgets of pacing.py.

Running streams are promised a bound for nearly all of their gaps, but the cost model predicts mean times.  The
difference is the noise of the machine and the error of the model: it is measured, because it differs between machines
and between hours.  Logarithms of the ratios are averaged with their squares; their 99th percentile is that of a
normal distribution.
"""

from __future__ import annotations

import math

DECAY = 0.98  # weight of the earlier ratios, at each new one
Z99 = 2.33  # standard deviations from the mean to the 99th percentile
PRIOR_P99 = 1.4  # assumed before the first ratio, unless the caller knows better,
PRIOR = 8.0  # with the weight of so many
MAX_RATIO = 4.0  # a ratio, or its inverse, counts as at most this: the process may have been stopped


class Spread:
    """Distribution of measured / predicted time of one kind of steps; the newest count most."""

    def __init__(self, prior_p99: float = PRIOR_P99) -> None:
        self.p99 = prior_p99  # 99th percentile of the ratio, at least 1.0
        self._weight = PRIOR
        self._sum = 0.0  # of the logarithms
        self._squares = PRIOR * (math.log(prior_p99) / Z99) ** 2

    def learn(self, predicted_s: float, passed_s: float) -> None:
        """Something that was predicted to take `predicted_s` took `passed_s`."""
        ratio = min(MAX_RATIO, max(1.0 / MAX_RATIO, passed_s / predicted_s))
        log = math.log(ratio)
        self._weight = DECAY * self._weight + 1.0
        self._sum = DECAY * self._sum + log
        self._squares = DECAY * self._squares + log * log
        mean = self._sum / self._weight
        deviation = math.sqrt(max(0.0, self._squares / self._weight - mean * mean))
        self.p99 = max(1.0, math.exp(mean + Z99 * deviation))
