"""Core sharing: which model computes next among models whose ranks are pinned to the same cores. Pure.

Two worker groups that compute at once on the same cores interrupt each other in the middle of steps: each barrier of
one waits for a time slice of the other, and both together compute less than one alone.  So one step runs at a time,
and the model that has computed least for its weight gets the next one.  A model with a prompt to compute, whose
request waits for a first token, goes first for at most `PROMPT_LEAD_S` of computing beyond its share.  A model that is
alone on its cores publishes ahead as usual; models on different cores do not wait for each other.

A model whose turn it is waits until all its cores are free, and those that are free already are kept for it: models
that come later in the order begin no step on them.  Otherwise one on the cores of two others, which end their steps at
different times, would never find both idle.  A model that has nothing to compute when they are free is passed over.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
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


def connected(claims: Iterable[Claim]) -> list[list[Claim]]:
    """The claims in sets: those whose cores overlap, directly or through others, are in the same one."""
    found: list[list[Claim]] = []
    for claim in claims:
        joined, apart = [claim], []
        for one in found:
            if any(overlap(claim.cores, other.cores) for other in one):
                joined += one
            else:
                apart.append(one)
        found = [*apart, joined]
    return found


class CoreShares:
    """Orders the claims of all models. Time in which a model had nothing to compute is not made up for.

    Models are compared while their claims are connected: what one computes on cores that another does not want is not
    charged to it.

    What a model has had beyond its share is not forgotten when its claim ends: short requests one after the other get
    no more than a long one.
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}  # `Claim.spent_s` at the previous call
        # Computing time / weight of each model beyond that of the model that has had least, of the claims on its cores.
        self._ahead: dict[str, float] = {}
        self._claiming: set[str] = set()  # at the previous call, and had something to compute when it was their turn

    def order(self, claims: Sequence[Claim], idle: Sequence[Claim] = ()) -> list[str]:
        """Names of `claims`, the one to go first in front. Must be called in each round.

        `idle`: the models that have nothing to compute now. A model that is in neither is forgotten.
        """
        ahead = dict[str, float]()
        for claim in (*claims, *idle):
            spent_s = claim.spent_s - self._spent.get(claim.name, claim.spent_s)
            ahead[claim.name] = self._ahead.get(claim.name, 0.0) + spent_s / claim.weight
        passed = dict.fromkeys(ahead, 0.0)  # computing time / weight that the others on a model's cores have all had
        for rivals in connected(claims):
            names = {claim.name for claim in rivals}
            least = min((ahead[name] for name in names & self._claiming), default=0.0)
            ahead |= {name: max(least, ahead[name]) for name in names}  # those whose claims have just begun
            least = min(ahead[name] for name in names)
            passed |= dict.fromkeys(names, least)
            for claim in idle:
                if any(overlap(claim.cores, rival.cores) for rival in rivals):
                    passed[claim.name] = max(passed[claim.name], least)
        self._ahead = {name: max(0.0, account - passed[name]) for name, account in ahead.items()}
        self._spent = {claim.name: claim.spent_s for claim in (*claims, *idle)}
        self._claiming = {claim.name for claim in claims}
        return [claim.name for claim in sorted(claims, key=self._rank)]

    def forget(self) -> None:
        """Forget all models. To be called where `order` is not, as their computing time would be charged later."""
        self._spent, self._ahead, self._claiming = {}, {}, set()

    def pass_over(self, name: str) -> None:
        """It was the turn of a model with a claim, which had nothing to compute: it waits for pages or token masks."""
        self._claiming.discard(name)

    def _rank(self, claim: Claim) -> tuple[float, str]:
        lead_s = PROMPT_LEAD_S if claim.has_prompts else 0.0
        return self._ahead[claim.name] - lead_s / claim.weight, claim.name


def allowed_depth(mine: Claim, claims: Sequence[Claim], depth: int, waiting: Container[str] = ()) -> int:
    """Steps of it that may be unacknowledged now: `depth` if it is alone on its cores.

    `waiting`: the models before it in the order that were allowed none, and compute none.
    """
    rivals = [claim for claim in claims if claim.name != mine.name and overlap(mine.cores, claim.cores)]
    if not rivals:
        return depth
    return 0 if any(claim.is_computing or claim.name in waiting for claim in rivals) else 1
