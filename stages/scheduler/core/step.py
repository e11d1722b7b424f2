"""Steps: what one pass of the worker computes, as composed (`Batch`) and as published (`Step`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.draft.draft_sequence import DraftSequence
from stages.scheduler.policy.tenant import Tenant

AnySequence = TypeVar("AnySequence", SequenceState, DraftSequence)


def attention_positions(start: int, count: int) -> int:
    """Pairs of query and key of `count` positions from `start` on."""
    return count * start + count * (count + 1) // 2


@dataclass(slots=True)
class StepEntry(Generic[AnySequence]):
    """Positions [start, start + count) of a sequence in a step; the last `samples` of them are sampled.

    Or the last `scored` of them score the prompt's token that follows each.
    """

    sequence: AnySequence
    start: int
    count: int
    samples: int
    draft_tokens: tuple[int, ...] = ()  # for the positions after `start`, to be verified
    scored: int = 0

    @property
    def positions(self) -> int:
        """Attention positions."""
        return attention_positions(self.start, self.count)


class Batch(NamedTuple, Generic[AnySequence]):
    """A composed step. It contains requests or draft sequences, never both."""

    entries: list[StepEntry[AnySequence]]
    tokens: int  # positions computed
    positions: int  # attention positions
    unscheduled: Sequence[Tenant] = ()  # tenants with work that found no place
    pauses_streams: bool = False  # running streams get no token in it


class PooledPart(NamedTuple):
    """Positions of an entry whose hidden states are pooled. Its place in `Step.pooled` is that among the sums."""

    entry: int  # index in the step
    first: int  # position, from the entry's start
    n: int


@dataclass(slots=True)
class Step:
    """A published step. Either `entries` or `draft_entries` is empty."""

    number: int
    entries: list[StepEntry[SequenceState]]
    draft_entries: list[StepEntry[DraftSequence]]
    tokens: int
    positions: int
    samples: int
    expected_s: float
    is_verifying: bool = False  # it has draft tokens: the next step depends on how many are accepted
    has_news: bool = False  # a stream gets its first token, or the last one that it may have
    pooled: Sequence[PooledPart] = ()

    @property
    def has_prompts_beside_streams(self) -> bool | None:
        """Whether it has prompt tokens beside streams; False: streams alone; None: neither, or tokens are scored.

        Several prompts of which one ends count as the former: it is a stream from then on.
        """
        if not self.samples or any(entry.scored for entry in self.entries):
            return None
        if self.phase == "decode":
            return False
        return True if len(self.entries) > 1 else None

    @property
    def phase(self) -> str:
        """One of `stats.STEP_PHASES`: what it computes. A step of outputs samples each of its positions."""
        if self.draft_entries:
            return "draft"
        return "prefill" if self.tokens > self.samples else "decode"
