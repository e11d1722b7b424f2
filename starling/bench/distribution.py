"""Distributions of lengths, as a user writes them: 128, uniform:50:500, lognormal:200:0.8, exponential:200."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from pipeline.errors import InvalidRequest

MAX_TOKENS = 1_000_000
FORMS = "N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or exponential:MEAN"
_PARAMETERS = {"uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}


class Lengths(NamedTuple):
    """A distribution of numbers of tokens; what is drawn lies between 1 and `MAX_TOKENS`."""

    kind: str  # "" is the fixed length a
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read a distribution. Raises `InvalidRequest`."""
        kind, *numbers = ["", text] if ":" not in text else text.split(":")
        try:
            found = cls(kind, *map(float, numbers))
        except (TypeError, ValueError):
            raise InvalidRequest(f"{text!r}: expected {FORMS}") from None
        if _PARAMETERS.get(kind, 1 if not kind else 0) != len(numbers):
            raise InvalidRequest(f"{text!r}: expected {FORMS}")
        most = 20.0 if kind == "lognormal" else MAX_TOKENS  # of the second number
        if not 1 <= found.a <= MAX_TOKENS or not 0 <= found.b <= most or (kind == "uniform" and found.b < found.a):
            raise InvalidRequest(
                f"{text!r}: lengths are from 1 to {MAX_TOKENS:,} tokens, deviations not negative, LOW is not above HIGH"
            )
        if kind in ("", "uniform") and not (found.a.is_integer() and found.b.is_integer()):
            raise InvalidRequest(f"{text!r}: expected whole numbers of tokens")
        return found

    def draw(self, rng: random.Random) -> int:
        """One length."""
        match self.kind:
            case "uniform":
                return rng.randint(int(self.a), int(self.b))
            case "normal":
                value = rng.gauss(self.a, self.b)
            case "lognormal":
                value = rng.lognormvariate(math.log(self.a), self.b)
            case "exponential":
                value = rng.expovariate(1 / self.a)
            case _:
                return int(self.a)
        return max(1, min(MAX_TOKENS, round(value)))
