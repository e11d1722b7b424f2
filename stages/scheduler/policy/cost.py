"""What a step will cost, in microseconds, learned from the steps that ran.

    cost = fixed + per_token * tokens + per_position * positions

`tokens` are the positions computed, `positions` the (query, key) pairs of their attention: a token at
position p looks at p + 1 of them.  `fixed` is reading the weights once, and the barriers.  The
estimate steers only how much of a prompt goes into a step, never what is computed: no output
depends on it.

What a server does in a second has more in it than steps: words between processes, and the steps of other models
on the same cores.  `pace` is the time from one step's end to the next one's, as a multiple of the cost.

The three coefficients are tracked by a Kalman filter as a slow random walk; outliers (a step during
which somebody else had the cores) are clipped, and coefficients stay positive.
"""

from __future__ import annotations

CLIP = 0.5  # residuals beyond this part of the prediction count as this much
UNIT_POSITIONS = 1000.0  # the third unknown is the cost of that many: all three are of like size
START = (1e6, 1e4, 1e4)  # variances (us^2) of what is not known yet, and the most they may become
DRIFT = (500.0, 1.0, 1.0)  # us^2 by which the coefficients may wander in a step
NOISE = 0.05  # of one measurement, as a part of the prediction
KEEP = 0.99  # of what is known of the pace, at each look
SLOWEST = 20.0  # a look at it counts for no more: a worker that starts compiles, or waits for the disk


class CostModel:
    """Coefficients in microseconds; the start values are those of a small model on two cores."""

    def __init__(self, fixed_us: float = 3000.0, token_us: float = 250.0, position_us: float = 0.15) -> None:
        self.fixed_us = fixed_us
        self.token_us = token_us
        self.position_us = position_us
        # Covariance, upper triangle: fixed, token, 1000 positions.
        self._p = (START[0], 0.0, 0.0, START[1], 0.0, START[2])
        self._predicted_s = self._passed_s = 0.0  # of late

    @property
    def pace(self) -> float:
        """At least 1.0."""
        return max(1.0, self._passed_s / self._predicted_s) if self._predicted_s else 1.0

    def passed(self, predicted_s: float, took_s: float) -> None:
        """Steps that should have taken `predicted_s` have followed each other in `took_s`."""
        self._predicted_s = KEEP * self._predicted_s + predicted_s
        self._passed_s = KEEP * self._passed_s + min(took_s, SLOWEST * predicted_s)

    def predict(self, tokens: int, positions: int) -> float:
        """Of one step, us."""
        return self.fixed_us + self.token_us * tokens + self.position_us * positions

    def chunk(self, budget_us: float, start: int, most: int) -> int:
        """How many tokens from position `start` on fit into `budget_us`; at most `most`, may be 0."""
        if budget_us <= 0.0:
            return 0
        n = min(float(most), budget_us / (self.token_us + self.position_us * start))
        # The later ones of the chunk look at the earlier ones too: n / 2 more each, on average.
        return min(most, int(budget_us / (self.token_us + self.position_us * (start + 0.5 * n))))

    def learn(self, tokens: int, positions: int, took_us: float) -> None:
        """A step with these features took that long."""
        expected = self.fixed_us + self.token_us * tokens + self.position_us * positions
        error = took_us - expected
        limit = CLIP * expected
        if error > limit:
            error = limit
        elif error < -limit:
            error = -limit
        y, z = float(tokens), positions / UNIT_POSITIONS
        a, b, c, d, e, f = self._p
        if a < START[0]:
            a += DRIFT[0]
        if d < START[1]:
            d += DRIFT[1]
        if f < START[2]:
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
