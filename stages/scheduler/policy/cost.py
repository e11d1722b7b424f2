"""The cost model: how long a step will take, in microseconds, learned from acknowledged steps.

    cost = fixed + per_token * tokens + per_position * positions

`tokens` are the positions computed, `positions` the (query, key) pairs of their attention: a token at position p
attends to p + 1 of them.  `fixed` is reading the weights once, and the barriers.  The estimate only decides how much
of a prompt goes into a step, never what is computed, so no output depends on it.

A server's time is not only steps: frames between processes, and steps of other models on the same cores.  `pace` is
the time from one step's end to the next step's end, as a multiple of the cost; `alone` and `beside` are its spread.

The first `WARM_STEPS` steps only scale the initial coefficients, by the median of measured and predicted times: the
machine and the model may differ from the initial values by a factor of 100, and steps of one shape cannot tell the
three coefficients apart.  After that they are tracked by a Kalman filter as a slow random walk.  Outliers (steps during
which another process had the cores) are clipped, and coefficients stay positive.  The first step after a worker's start
is not learned: it includes the start.
"""

from __future__ import annotations

from stages.scheduler.policy.spread import Spread

CLIP = 0.5  # residuals are clipped to this part of the prediction
UNIT_POSITIONS = 1000.0  # the third coefficient is tracked for so many positions: all three are of similar size
INITIAL_VARIANCE = (1e6, 1e4, 1e4)  # us^2, of each coefficient; also the most that it may become
DRIFT = (500.0, 1.0, 1.0)  # us^2, growth of the variance in a step
NOISE = 0.05  # of one measurement, as a part of the prediction
PACE_DECAY = 0.99  # weight of the earlier measurements of the pace, at each new one
PACE_CLIP = 2.0  # a measurement of the pace counts as at most so many times the present one
PACE_PRIOR = 10  # measurements of pace 1 that are assumed before the first one
WARM_STEPS = 5
BESIDE_PRIOR_P99 = 1.8  # the first chunks follow steps without prompt tokens, which say little of their cost


class CostModel:
    """Coefficients in microseconds; the initial values are those of a small model on two cores."""

    def __init__(self, fixed_us: float = 3000.0, token_us: float = 250.0, position_us: float = 0.15) -> None:
        self.fixed_us = fixed_us
        self.token_us = token_us
        self.position_us = position_us
        self._initial = (fixed_us, token_us, position_us)
        self._ratios = [1.0]  # measured times of the first steps, as multiples of the initial prediction
        # Covariance, upper triangle: fixed, token, 1000 positions.
        self._p = (INITIAL_VARIANCE[0], 0.0, 0.0, INITIAL_VARIANCE[1], 0.0, INITIAL_VARIANCE[2])
        self._variance, self._drift = INITIAL_VARIANCE, DRIFT  # at the scale of this model
        self._predicted_s = self._passed_s = 0.0  # decaying sums
        self._is_starting = False  # the next step is the first one of a worker
        # Of steps of streams without prompt tokens, and with them.
        self.alone, self.beside = Spread(), Spread(BESIDE_PRIOR_P99)

    @property
    def pace(self) -> float:
        """Time that passes for each second of predicted cost, at least 1.0."""
        return max(1.0, self._passed_s / self._predicted_s) if self._predicted_s else 1.0

    @property
    def is_known(self) -> bool:
        """Enough steps were measured for predictions of about the right size."""
        return len(self._ratios) > WARM_STEPS

    def start_worker(self) -> None:
        """The next step is the first one of a worker. Call `learn` for each step, then `learn_pace` for all of them."""
        self._is_starting = True

    def learn_pace(self, predicted_s: float, passed_s: float, spread: Spread | None = None) -> None:
        """Steps with a predicted cost of `predicted_s` were acknowledged after `passed_s`.

        `spread`: `alone` or `beside`, if all of them are of that kind.
        """
        if self._is_starting:
            self._is_starting = False
        elif self.is_known:
            if spread is not None:
                spread.learn(predicted_s, passed_s)
            if not self._predicted_s:
                self._predicted_s = self._passed_s = PACE_PRIOR * predicted_s
            limit_s = PACE_CLIP * self.pace * predicted_s
            self._predicted_s = PACE_DECAY * self._predicted_s + predicted_s
            self._passed_s = PACE_DECAY * self._passed_s + min(passed_s, limit_s)

    def predict(self, tokens: int, positions: int) -> float:
        """Cost of one step, us."""
        return self.fixed_us + self.token_us * tokens + self.position_us * positions

    def of_chunk(self, start: int, count: int) -> float:
        """Microseconds of `count` prompt tokens from position `start` on, in a step that is computed anyway."""
        return self.token_us * count + self.position_us * count * (start + 0.5 * count)

    def chunk(self, budget_us: float, start: int, most: int) -> int:
        """Tokens from position `start` on that fit into `budget_us`; at most `most`, may be 0."""
        if budget_us <= 0.0:
            return 0
        n = min(float(most), budget_us / (self.token_us + self.position_us * start))
        # Later tokens of the chunk attend to its earlier ones as well: n / 2 more each, on average.
        return min(most, int(budget_us / (self.token_us + self.position_us * (start + 0.5 * n))))

    def learn(self, tokens: int, positions: int, took_us: float) -> None:
        """An acknowledged step of so many tokens and attention positions took `took_us`."""
        if self._is_starting:
            return
        if not self.is_known:
            self._scale(tokens, positions, took_us)
            return
        expected = self.fixed_us + self.token_us * tokens + self.position_us * positions
        error = took_us - expected
        limit = CLIP * expected
        if error > limit:
            error = limit
        elif error < -limit:
            error = -limit
        y, z = float(tokens), positions / UNIT_POSITIONS
        a, b, c, d, e, f = self._p
        if a < self._variance[0]:
            a += self._drift[0]
        if d < self._variance[1]:
            d += self._drift[1]
        if f < self._variance[2]:
            f += self._drift[2]
        g0 = a + b * y + c * z
        g1 = b + d * y + e * z
        g2 = c + e * y + f * z
        scale = (NOISE * expected) ** 2 + g0 + g1 * y + g2 * z
        k0, k1, k2 = g0 / scale, g1 / scale, g2 / scale
        self._p = (a - k0 * g0, b - k0 * g1, c - k0 * g2, d - k1 * g1, e - k1 * g2, f - k2 * g2)
        self.fixed_us = max(10.0, self.fixed_us + k0 * error)
        self.token_us = max(1.0, self.token_us + k1 * error)
        self.position_us = max(1e-4, self.position_us + k2 * error / UNIT_POSITIONS)

    def _scale(self, tokens: int, positions: int, took_us: float) -> None:
        """Scale the initial coefficients, and their variances, by the median ratio of the first steps."""
        fixed_us, token_us, position_us = self._initial
        self._ratios.append(took_us / (fixed_us + token_us * tokens + position_us * positions))
        scale = sorted(self._ratios)[(len(self._ratios) - 1) // 2]  # the lower median
        self.fixed_us = max(10.0, scale * fixed_us)
        self.token_us = max(1.0, scale * token_us)
        self.position_us = max(1e-4, scale * position_us)
        a, b, c = (scale * scale * one for one in INITIAL_VARIANCE)
        self._variance, self._p = (a, b, c), (a, 0.0, 0.0, b, 0.0, c)
        d, e, f = (scale * scale * one for one in DRIFT)
        self._drift = (d, e, f)
