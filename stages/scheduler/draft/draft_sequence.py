"""A draft sequence: a small model computes it beside a sequence of a large model, to propose draft tokens.

It has the same tokens, seed and sampling parameters as the sequence that it drafts for (its *target*, of another
engine) and continues from there with what the small model would answer to the same request.  Whenever more tokens of
the target are known it follows: it keeps the positions with equal tokens and computes the others again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from pipeline.protocol.messages import Sampling
from stages.scheduler.core.run_state import RunState


class DraftTarget(NamedTuple):
    """What a draft sequence needs of its target."""

    tokens: array[int]  # i32: prompt and known output; copied
    prompt_len: int
    end: int  # most tokens, output included
    sampling: Sampling
    choice: int
    stop_ids: frozenset[int]
    salt: str
    owner: tuple[str, str]  # tenant and session, for log lines


class DraftSequence:
    """The first `base` tokens are the target's, the others are draft tokens, up to `goal` tokens in all."""

    __slots__ = (
        "__weakref__",
        "base",
        "goal",
        "is_done",
        "is_wanted",
        "run",
        "spent_s",
        "stop_ids",
        "suspicion",
        "used_at",
    )

    def __init__(
        self, lease_id: str, target: DraftTarget, end: int, is_wanted: Callable[[DraftSequence], bool], now: float
    ) -> None:
        """`is_wanted` is False once the target has ended or has dropped the draft sequence."""
        self.run = RunState(lease_id, target.tokens[:], end)
        self.run.owner = target.owner
        self.stop_ids = target.stop_ids
        self.is_wanted = is_wanted
        self.used_at = now  # s, the last `DraftPool.follow`
        self.base = self.run.valid_end = self.run.length
        self.goal = self.run.length + 1
        self.spent_s = 0.0  # of computing, in all steps with it
        self.is_done = False  # dismissed; it stays until no step computes it
        self.suspicion = 0  # DEATH or STALL if a worker has ended in a step with it, see recovery/quarantine.py

    @property
    def is_complete(self) -> bool:
        """It has proposed all that it was asked for, or never will."""
        return self.is_done or self.run.length >= self.goal

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        """The tokens that follow the target's."""
        return tuple(self.run.tokens[self.base :])

    @property
    def has_work(self) -> bool:
        """It has positions to compute, and pages for them."""
        run = self.run
        return not self.is_done and run.known < self.goal and run.planned < run.leased
