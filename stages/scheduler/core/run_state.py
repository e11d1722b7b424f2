"""Run state: the tokens, positions and pages of a sequence that a model computes.

Requests (`SequenceState`) and draft sequences (`DraftSequence`) each have one.  Positions count from the start of
the prompt:

    0 ........ prompt_len ........ length ........ end
      prompt               output           may still come

    computed  positions whose keys and values exist, acknowledged by the worker
    planned   positions that published steps compute (>= computed)
    ahead     samples of published steps that are not known yet
"""

from __future__ import annotations

from array import array

NEVER = 1 << 60  # a position that no sequence reaches


class RunState:
    """Plain attributes: the step loop reads and writes them thousands of times a second."""

    __slots__ = (
        "ahead",
        "committed",
        "computed",
        "end",
        "extend_at",
        "group",
        "inflight",
        "is_starved",
        "lease_id",
        "leased",
        "length",
        "n_unread",
        "owner",
        "pages",
        "pending_id",
        "planned",
        "row",
        "tokens",
        "valid_end",
    )

    def __init__(self, lease_id: str, tokens: array[int], end: int) -> None:
        self.lease_id = lease_id  # the sequence's name in frames to kv
        self.tokens = tokens  # i32: prompt and known output
        self.length = len(tokens)
        self.end = end  # most tokens, output included
        self.valid_end = NEVER  # kv must not cache positions from here on
        self.row = -1  # row of the step arena, -1: none
        self.group = 0  # the worker group that computes it while it has a row
        self.pending_id = 0  # id of the unanswered Acquire or Extend, 0: none
        self.owner = ("", "")  # tenant and session, for log lines
        self.reset()

    def reset(self) -> None:
        """No pages and nothing computed: a new or a preempted sequence."""
        self.pages: tuple[int, ...] = ()
        self.n_unread = 0  # leading places whose pages of groups with a window no step reads any more; released
        self.leased = 0  # positions that `pages` hold, or held
        self.extend_at = NEVER  # more pages are requested when `planned` passes this position
        self.is_starved = False  # the last Extend was denied
        self.committed = 0  # positions reported to kv
        self.computed = 0
        self.planned = 0
        self.ahead = 0
        self.inflight = 0  # unacknowledged steps that compute it

    @property
    def known(self) -> int:
        """Tokens after all published steps: known ones and samples that are still to come."""
        return self.length + self.ahead

    def void_unacknowledged(self) -> None:
        """Published steps will not be computed: continue after the last acknowledged position."""
        self.inflight = self.ahead = 0
        self.planned = self.computed

    def __repr__(self) -> str:
        return (
            f"<{self.lease_id} row {self.row} computed {self.computed} planned {self.planned} "
            f"length {self.length}/{self.end} leased {self.leased} inflight {self.inflight}>"
        )
