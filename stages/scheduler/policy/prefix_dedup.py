"""In-flight prefix deduplication: prompts with a common prefix that arrive together compute it once.

The prefix cache contains a page only after it is full and committed.  Of several prompts that share a prefix which is
not cached yet, the first one (the *leader*) is computed; the others have their row but request pages only when the
leader has committed the shared prefix.  Prompts are computed one after the other anyway, so waiting for the leader
takes no longer than computing the same positions again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from stages.scheduler.core.sequence import Phase, SequenceState

MIN_SHARED = 64  # tokens that are shared and not committed; waiting for fewer does not pay


def common_prefix(a: array[int], b: array[int], page_tokens: int) -> int:
    """Length of the common prefix in whole pages; the last token of `a` never counts."""
    low, high = 0, min(len(a) - 1, len(b)) // page_tokens
    while low < high:
        middle = (low + high + 1) // 2
        at = middle * page_tokens
        if a[low * page_tokens : at] == b[low * page_tokens : at]:
            low = middle
        else:
            high = middle - 1
    return low * page_tokens


def assign_leader(
    sequence: SequenceState,
    scheduled: list[SequenceState],
    page_tokens: int,
    responds: Callable[[SequenceState], bool] = lambda _: True,
) -> bool:
    """Set `dedup_leader` to the sequence that computes most of the prefix right now. False: there is none.

    `responds`: whether the worker group of a sequence completes its steps; a leader of another one is not waited for.
    """
    tokens, best = sequence.run.tokens, 0
    for other in scheduled:
        run = other.run
        is_computing = other.phase is Phase.PREFILLING or (other.phase is Phase.PENDING and run.pending_id)
        if other is sequence or not is_computing or other.is_done or other.is_preempting:
            continue
        if other.salt != sequence.salt or run.length - run.committed < MIN_SHARED:
            continue
        shared = common_prefix(tokens, run.tokens, page_tokens)
        if shared - run.committed >= MIN_SHARED and shared > best and responds(other):
            best = sequence.dedup_tokens = shared
            sequence.dedup_leader = other
    return best > 0


def is_over(sequence: SequenceState, responds: Callable[[SequenceState], bool] = lambda _: True) -> bool:
    """The leader has committed the shared prefix, or will not compute it soon. `responds`: see `assign_leader`."""
    leader = sequence.dedup_leader
    if leader is None:
        return True
    return (
        leader.run.committed >= sequence.dedup_tokens
        or leader.is_done
        or leader.is_preempting
        or leader.run.row < 0
        or leader.phase is Phase.DECODING
        or not responds(leader)
    )
