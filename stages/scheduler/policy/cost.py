"""The cost model: how long a step will take, in microseconds, learned from acknowledged steps.

    cost = fixed + per_token * tokens + per_position * positions

`tokens` are the positions computed, `positions` the (query, key) pairs of their attention: a token at position p
attends to p + 1 of them.  `fixed` is reading the weights once, and the barriers.  The estimate only decides how much
of a prompt goes into a step, never what is computed, so no output depends on it.

A server's time is not only steps: frames between processes, and steps of other models on the same cores.  `pace` is
the time from one step's end to the next step's end, as a multiple of the cost.

The three coefficients are tracked by a Kalman filter as a slow random walk.  Outliers (steps during which another
process had the cores) are clipped, and coefficients stay positive.
"""

from __future__ import annotations

CLIP = 0.5  # residuals are clipped to this part of the prediction
UNIT_POSITIONS = 1000.0  # the third coefficient is tracked for so many positions: all three are of similar size
INITIAL_VARIANCE = (1e6, 1e4, 1e4)  # us^2, of each coefficient; also the most that it may become
DRIFT = (500.0, 1.0, 1.0)  # us^2, growth of the variance in a step
NOISE = 0.05  # of one measurement, as a part of the prediction
PACE_DECAY = 0.99  # weight of the earlier measurements of the pace, at each new one
MAX_PACE = 20.0  # of one measurement: a worker that starts compiles kernels, or waits for the disk


class CostModel:
    """Coefficients in microseconds; the initial values are those of a small model on two cores."""

    def __init__(self, fixed_us: float = 3000.0, token_us: float = 250.0, position_us: float = 0.15) -> None:
        self.fixed_us = fixed_us
        self.token_us = token_us
        self.position_us = position_us
        # Covariance, upper triangle: fixed, token, 1000 positions.
        self._p = (INITIAL_VARIANCE[0], 0.0, 0.0, INITIAL_VARIANCE[1], 0.0, INITIAL_VARIANCE[2])
        self._predicted_s = self._passed_s = 0.0  # decaying sums

    @property
    def pace(self) -> float:
        """Time that passes for each second of predicted cost, at least 1.0."""
        return max(1.0, self._passed_s / self._predicted_s) if self._predicted_s else 1.0

    def learn_pace(self, predicted_s: float, passed_s: float) -> None:
        """Steps with a predicted cost of `predicted_s` were acknowledged after `passed_s`."""
        self._predicted_s = PACE_DECAY * self._predicted_s + predicted_s
        self._passed_s = PACE_DECAY * self._passed_s + min(passed_s, MAX_PACE * predicted_s)

    def predict(self, tokens: int, positions: int) -> float:
        """Cost of one step, us."""
        return self.fixed_us + self.token_us * tokens + self.position_us * positions

    def chunk(self, budget_us: float, start: int, most: int) -> int:
        """Tokens from position `start` on that fit into `budget_us`; at most `most`, may be 0."""
        if budget_us <= 0.0:
            return 0
        n = min(float(most), budget_us / (self.token_us + self.position_us * start))
        # Later tokens of the chunk attend to its earlier ones as well: n / 2 more each, on average.
        return min(most, int(budget_us / (self.token_us + self.position_us * (start + 0.5 * n))))

    def learn(self, tokens: int, positions: int, took_us: float) -> None:
        """An acknowledged step of so many tokens and attention positions took `took_us`."""
        expected = self.fixed_us + self.token_us * tokens + self.position_us * positions
        error = took_us - expected
        limit = CLIP * expected
        if error > limit:
            error = limit
        elif error < -limit:
            error = -limit
        y, z = float(tokens), positions / UNIT_POSITIONS
        a, b, c, d, e, f = self._p
        if a < INITIAL_VARIANCE[0]:
            a += DRIFT[0]
        if d < INITIAL_VARIANCE[1]:
            d += DRIFT[1]
        if f < INITIAL_VARIANCE[2]:
            f += DRIFT[2]
        g0 = a + b * y + c * z
        g1 = b + d * y + e * z
        g2 = c + e * y + f * z
        scale = (NOISE * expected) ** 2 + g0 + g1 * y + g2 * z
        k0, k1, k2 = g0 / scale, g1 / scale, g2 / scale
        self._p = (a - k0 * g0, b - k0 * g1, c - k0 * g2, d - k1 * g1, e - k1 * g2, f - k2 * g2)
        self.fixed_us = max(10.0, self.fixed_us + k0 * error)
        self.token_us = max(1.0, self.token_us + k1 * error)
        self.position_us = max(1e-4, self.position_us + k2 * error / UNIT_POSITIONS)
