"""Bounds of numbers in a JSON Schema that the library of grammars would refuse or misread, narrowed to the next it can.

The library reads bounds as 64-bit floating point.  It holds bounds of integers as 64-bit integers: larger ones become
the largest, smaller ones an overflow.  Bounds of other numbers it writes with the shortest digits that read as the
same, which may be beyond the bound.  Of a bound with more than 15 digits it may read another number if there is a
point or an exponent among them.  Up to 10**14 none of this has an effect, and bounds stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

SMALL = 10**14  # up to here the library reads and writes bounds as they are
EXACT = 1 << 53  # up to here each integer is a 64-bit float
LARGEST = (1 << 63) - 1  # the library's largest integer, which it makes of 2**63
WIDEST = (1 << 63) - 1024  # the largest float below; its negative is the library's smallest bound of integers
WIDEST_NUMBER = 9 * 10**18  # of numbers with a fraction: a round one below 2**63
_DIGITS = 15  # decimals of so many digits stay the same as a 64-bit float
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def narrow_bounds(schema: dict[str, Any]) -> None:
    """Narrow the bounds of one schema in place, not those of schemas inside it.

    What matches afterwards has matched before.  Where no number within the library's bounds matches, none does, unless
    `const` or `enum` lists a larger one: the library writes that as it is, and the bounds stay.
    """
    bounds = {key: schema[key] for key in (*_LOW, *_HIGH) if _is_finite(schema.get(key))}
    if all(map(_is_small, bounds.values())) or not all(map(_is_small, filter(_is_finite, _listed(schema)))):
        return
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in kinds and "number" not in kinds and not any(schema.get(key) is True for key in (_LOW[1], _HIGH[1])):
        made = _integer_bounds(bounds)
        if made != bounds or any(isinstance(bound, float) for bound in bounds.values()):
            for key in bounds:
                del schema[key]
            schema.update(made)
    else:
        schema.update({key: _number_bound(bound, key in _LOW) for key, bound in bounds.items()})


def _listed(schema: dict[str, Any]) -> list[Any]:
    values = schema.get("enum")
    return [schema.get("const"), *(values if isinstance(values, list) else [])]


def _is_small(number: float) -> bool:
    return -SMALL <= number <= SMALL


def _is_finite(bound: Any) -> bool:
    if isinstance(bound, float):
        return math.isfinite(bound)
    return isinstance(bound, int) and not isinstance(bound, bool)


def _integer_bounds(bounds: dict[str, Any]) -> dict[str, int]:
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    low, high = max(lows, default=-WIDEST), min(highs, default=LARGEST)
    if low > min(high, WIDEST) or high < -WIDEST:
        return {"minimum": WIDEST, "maximum": -WIDEST}
    made = {}
    if lows:
        made["minimum"] = -_as_float(-max(low, -WIDEST))
    if highs:
        made["maximum"] = LARGEST + 1 if high >= LARGEST else _as_float(high)
    return made


def _as_float(bound: int) -> int:
    """The largest 64-bit float that is at most `bound`."""
    made = float(bound)
    return int(made if made <= bound else math.nextafter(made, -math.inf))


def _number_bound(bound: float, is_low: bool) -> float:
    """The bound, or one further in that the library writes as it is."""
    if is_low:
        return -_number_bound(-bound, False)
    if -SMALL <= bound <= SMALL or bound < -WIDEST_NUMBER:  # the latter is refused
        return bound
    whole = math.floor(min(bound, WIDEST_NUMBER))
    unit = 1 if -EXACT <= whole <= EXACT else 10 ** max(0, len(str(abs(whole))) - _DIGITS)
    return whole // unit * unit  # towards the smaller numbers, also below zero
