"""Output lengths: how many tokens an output has until it stops by itself. Pure.

The mean is (output tokens) / (outputs that stopped), as for a radioactive decay.  So outputs that still run count as
well, and outputs that were cut off by their limit, their deadline or their client do not make the mean too small.
Some outputs of an assumed length always count beside them: requests for a single token, none of which stops, say little
about the length of other outputs.  A request's own limit is applied by the caller.
"""

from __future__ import annotations

INITIAL_MEAN = 64.0  # tokens
ASSUMED_STOPS = 8.0  # outputs of that length that are assumed to have stopped, besides those that did
DECAY = 0.99  # weight of earlier outputs, at each one that ends
MAX_MEAN = 1e6  # also of outputs that never stop


class OutputLengths:
    """Of one model. `generated` is the number of output tokens so far, of all sequences."""

    def __init__(self, mean: float = INITIAL_MEAN) -> None:
        self._assumed_tokens = mean * ASSUMED_STOPS
        self._tokens = self._stops = 0.0  # decaying sums
        self._counted = 0  # of `generated`

    def record_end(self, generated: int, has_stopped: bool) -> None:
        """An output has ended; `has_stopped`: by a stop id or a stop string."""
        self._tokens = DECAY * (self._tokens + generated - self._counted)
        self._stops = DECAY * self._stops + has_stopped
        self._counted = generated

    def mean(self, generated: int) -> float:
        """Expected tokens of an output, and as many more of an output that runs."""
        tokens = self._assumed_tokens + self._tokens + generated - self._counted
        return min(MAX_MEAN, tokens / (ASSUMED_STOPS + self._stops))
