"""Whose turn it is to compute, among versions and models whose ranks have the same cores.

Two groups that compute at once on the same cores take them from each other in the middle of steps: each
barrier of one waits for a time slice of the other, and both together do less than one alone.  So one
step runs at a time: whoever has computed least has the next one.  Somebody waits for a first token where
a prompt is to be computed: that goes first, for at most `LEAD_S` of computing ahead of the others' share.  A
model that is alone runs ahead as ever; models with cores of their own do not wait for each other.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

LEAD_S = 1.0


class Claim(NamedTuple):
    """Of a model that has something to compute."""

    name: str
    cores: frozenset[int]  # its ranks are pinned to; empty: any
    spent_s: float  # of computing, in all steps so far
    is_computing: bool  # a step of it is published and not acknowledged
    has_prompts: bool = False  # somebody waits for a first token


def overlap(one: frozenset[int], other: frozenset[int]) -> bool:
    """Have they a core in common? Empty: any core."""
    return not one or not other or bool(one & other)


def share(one: Claim, other: Claim) -> bool:
    """Do they want the same cores?"""
    return overlap(one.cores, other.cores)


class Turns:
    """Who goes first. Time in which a model had nothing to compute is not made up for."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}  # computing time as it was seen last
        self._account: dict[str, float] = {}  # of those who have claims: by which they are compared

    def order(self, claims: Items[Claim]) -> list[str]:
        """Names, the one with the best claim first. To be called with all claims there are."""
        names = {claim.name for claim in claims}
        for claim in claims:
            if claim.name in self._account:
                self._account[claim.name] += claim.spent_s - self._spent[claim.name]
            self._spent[claim.name] = claim.spent_s
        old = [self._account[name] for name in names if name in self._account]
        self._account = {name: self._account.get(name, min(old, default=0.0)) for name in names}
        self._spent = {name: self._spent[name] for name in names}
        return [claim.name for claim in sorted(claims, key=self._rank)]

    def _rank(self, claim: Claim) -> tuple[float, str]:
        return self._account[claim.name] - (LEAD_S if claim.has_prompts else 0.0), claim.name


def steps_ahead(mine: Claim, claims: Items[Claim], depth: int) -> int:
    """How many steps of it may be unacknowledged now: `depth` for one that is alone on its cores."""
    rivals = [claim for claim in claims if claim.name != mine.name and share(mine, claim)]
    if not rivals:
        return depth
    return 0 if any(claim.is_computing for claim in rivals) else 1
