"""Prompts that begin alike and arrive together: compute the common beginning once.

The prefix cache knows a page only when it is full and committed.  Of several prompts that share a beginning
nobody has computed yet, the first goes ahead; the others have their row but ask for pages only when
what they share has been committed.  Prompts are computed one after the other anyway, so waiting for a
neighbour costs no more than computing the same again.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from stages.scheduler.core.sequence import Sequence, State

WORTHWHILE = 64  # shared tokens that are not committed yet


class Wait(NamedTuple):
    """`sequence` asks for its pages once `leader` has committed `shared` positions, or gives up."""

    sequence: Sequence
    leader: Sequence
    shared: int

    @property
    def is_over(self) -> bool:
        leader = self.leader
        return (
            leader.committed >= self.shared
            or leader.is_over
            or leader.is_leaving
            or leader.row < 0
            or leader.state is State.DECODING
        )


def common(a: array[int], b: array[int], page_tokens: int) -> int:
    """Length of the common beginning, in whole pages; the last token of `a` never counts."""
    low, high = 0, min(len(a) - 1, len(b)) // page_tokens
    while low < high:
        middle = (low + high + 1) // 2
        at = middle * page_tokens
        if a[low * page_tokens : at] == b[low * page_tokens : at]:
            low = middle
        else:
            high = middle - 1
    return low * page_tokens


def leader_of(sequence: Sequence, held: list[Sequence], page_tokens: int) -> Wait | None:
    """Whom `sequence` should wait for: who computes most of its beginning right now."""
    best: Wait | None = None
    for other in held:
        is_coming = other.state is State.PREFILLING or (other.state is State.PENDING and other.ask)
        if other is sequence or not is_coming or other.is_over or other.is_leaving:
            continue
        if other.salt != sequence.salt or other.length - other.committed < WORTHWHILE:
            continue
        shared = common(sequence.tokens, other.tokens, page_tokens)
        if shared - other.committed >= WORTHWHILE and (best is None or shared > best.shared):
            best = Wait(sequence, other, shared)
    return best
