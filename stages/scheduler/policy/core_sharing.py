"""Core sharing: which model computes next among models whose ranks are pinned to the same cores. Pure.

Two worker groups that compute at once on the same cores interrupt each other in the middle of steps: each barrier of
one waits for a time slice of the other, and both together compute less than one alone.  So one step runs at a time,
and the model that has computed least for its weight gets the next one.  A model with a prompt to compute, whose
request waits for a first token, goes first for at most `PROMPT_LEAD_S` of computing beyond its share.  A model that is
alone on its cores publishes ahead as usual; models on different cores do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PROMPT_LEAD_S = 1.0


class Claim(NamedTuple):
    """A model that has something to compute."""

    name: str
    cores: frozenset[int]  # that its ranks are pinned to; empty: any core
    spent_s: float  # of computing, in all steps so far
    is_computing: bool  # a step of it is published and not acknowledged
    has_prompts: bool = False  # a request waits for its first token
    weight: float = 1.0  # its share of the computing time, relative to the others'


def overlap(one: frozenset[int], other: frozenset[int]) -> bool:
    """Whether two sets of cores have one in common. An empty set means any core."""
    return not one or not other or bool(one & other)


class CoreShares:
    """Orders the claims of all models. Time in which a model had nothing to compute is not made up for."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}  # `Claim.spent_s` at the previous call
        self._account: dict[str, float] = {}  # computing time / weight of the models with claims, comparable

    def order(self, claims: Sequence[Claim]) -> list[str]:
        """Names, the one to go first in front. Must be called with all claims."""
        names = {claim.name for claim in claims}
        for claim in claims:
            if claim.name in self._account:
                self._account[claim.name] += (claim.spent_s - self._spent[claim.name]) / claim.weight
            self._spent[claim.name] = claim.spent_s
        known = [self._account[name] for name in names if name in self._account]
        self._account = {name: self._account.get(name, min(known, default=0.0)) for name in names}
        self._spent = {name: self._spent[name] for name in names}
        return [claim.name for claim in sorted(claims, key=self._rank)]

    def _rank(self, claim: Claim) -> tuple[float, str]:
        lead_s = PROMPT_LEAD_S if claim.has_prompts else 0.0
        return self._account[claim.name] - lead_s / claim.weight, claim.name


def allowed_depth(mine: Claim, claims: Sequence[Claim], depth: int) -> int:
    """Steps of it that may be unacknowledged now: `depth` if it is alone on its cores."""
    rivals = [claim for claim in claims if claim.name != mine.name and overlap(mine.cores, claim.cores)]
    if not rivals:
        return depth
    return 0 if any(claim.is_computing for claim in rivals) else 1
