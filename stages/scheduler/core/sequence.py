"""One line of tokens: what it wants, how far it is, and the states it may pass through.

    PENDING --> PREFILLING --> DECODING --> FINISHED   every token that was asked for, or a stop
       |  ^---------'-------------'  |                 (back: set aside, to be resumed)
       `-------------> FAILED <------'                 error, time-out

A finished or failed sequence has said its last word; it keeps its row and pages until no
unacknowledged step names it.  Positions are counted from the start of the prompt:

    0 ........ prompt_len ........ length ........ end
      prompt               output           may still come
    computed  positions whose keys and values stand, acknowledged by the worker
    planned   positions that published steps compute (>= computed)
    ahead     samples of published steps that are not known yet
"""

from __future__ import annotations

import enum
import math
from array import array
from typing import TYPE_CHECKING

from pipeline.protocol.messages import Sampling, Submit

if TYPE_CHECKING:
    from stages.scheduler.draft.proposer import Guess
    from stages.scheduler.policy.prefix_dedup import Wait
    from stages.scheduler.policy.queues import Tenant

PRIORITY_S = 10.0  # head start in the tenant's queue that priority 1 is worth
MOST_S = 50.0  # that no priority reaches,
MOST_PART = 1 / 6  # nor this part of a request's time: who is overtaken for longer runs out of it
NEVER = 1 << 60


class State(enum.Enum):
    PENDING = "pending"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"


LEGAL: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.PREFILLING, State.FINISHED, State.FAILED}),
    State.PREFILLING: frozenset({State.DECODING, State.PENDING, State.FINISHED, State.FAILED}),
    State.DECODING: frozenset({State.PENDING, State.FINISHED, State.FAILED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}


class IllegalTransitionError(RuntimeError):
    """A fault of the scheduler: a sequence cannot go from its state to that one."""


def head_start_s(priority: int, time_s: float = math.inf) -> float:
    """Of a request that may take `time_s`. Grows with each level, by less and less."""
    return min(MOST_S, MOST_PART * time_s) * priority / (abs(priority) + MOST_S / PRIORITY_S - 1)


class Sequence:
    """A submitted sequence. Plain attributes: the step loop touches them thousands of times a second.

    `order` numbers submissions; with `key` it orders a tenant's queue (lower first) and is kept for
    life, so that a sequence that was set aside is older than whatever came after it.
    """

    __slots__ = (
        "__weakref__",
        "accepted",
        "ahead",
        "arrived",
        "ask",
        "cached_tokens",
        "choice",
        "committed",
        "computed",
        "deadline",
        "drafter",
        "drafts",
        "end",
        "extend_at",
        "id",
        "inflight",
        "is_announced",
        "is_leaving",
        "is_over",
        "is_starved",
        "key",
        "lease",
        "leased",
        "length",
        "max_tokens",
        "order",
        "owner",
        "pages",
        "planned",
        "priority",
        "prompt_len",
        "request",
        "row",
        "salt",
        "sampling",
        "speculate",
        "started",
        "state",
        "stop_ids",
        "strikes",
        "tenant",
        "tokens",
        "valid_end",
        "wait",
    )

    def __init__(self, frame: Submit, owner: bytes, tenant: Tenant, now: float, order: int) -> None:
        tokens = array("i")
        tokens.frombytes(frame.prompt)
        self.prompt_len = len(tokens)
        tokens.frombytes(frame.forced)
        self.id: str = frame.sequence
        self.lease: str = frame.sequence  # its name towards kv: differs when an id is submitted anew
        self.request: str = frame.request
        self.owner = owner  # the gateway's peer key; b"" once nobody wants the output
        self.tenant = tenant
        self.tokens = tokens  # i32: prompt and known output
        self.length = len(tokens)
        self.max_tokens: int = frame.max_tokens
        self.end = self.prompt_len + frame.max_tokens
        self.valid_end = NEVER  # tokens past it were not used (a stop string)
        self.sampling: Sampling = frame.sampling
        self.choice: int = frame.choice
        self.stop_ids = frozenset(frame.stop_ids)
        self.salt: str = frame.cache_salt
        self.priority: int = frame.priority
        self.deadline = now + frame.deadline_ms / 1000 if frame.deadline_ms > 0 else math.inf
        self.arrived = now
        self.started = 0.0  # when it first got its pages
        self.order = order
        self.key = (now - head_start_s(frame.priority, self.deadline - now), order)
        self.state = State.PENDING
        self.is_over = False  # no output is wanted any more
        self.is_leaving = False  # to be set aside once no step names it
        self.is_announced = False  # its first tokens (with cached_tokens) have been sent
        self.strikes = 0  # deaths of the worker in a step with this sequence, see retry.py
        self.speculate: int = frame.speculate
        self.drafter: Guess | None = None
        self.accepted = 0  # draft tokens accepted
        self.cached_tokens = 0
        self.row = -1
        self.ask = 0  # id of the unanswered Acquire or Extend
        self.reset()

    def reset(self) -> None:
        """No pages and nothing computed: a new sequence, or one that was set aside."""
        self.pages: tuple[int, ...] = ()
        self.leased = 0  # positions that `pages` hold
        self.extend_at = NEVER  # ask for more pages when `planned` passes it
        self.is_starved = False  # the last Extend was denied
        self.committed = 0  # positions that kv has been told of
        self.computed = 0
        self.planned = 0
        self.ahead = 0
        self.inflight = 0  # unacknowledged steps that name it
        self.drafts: tuple[int, ...] = ()  # of the verification under way
        self.wait: Wait | None = None  # for another's computing of what both begin with

    def move(self, state: State) -> None:
        """Raises `IllegalTransitionError`."""
        if state not in LEGAL[self.state]:
            raise IllegalTransitionError(f"{self.id}: {self.state.value} -> {state.value}")
        self.state = state

    @property
    def outputs(self) -> int:
        """Known output tokens."""
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Positions still to be computed if it runs to its limit."""
        return max(0, self.end - 1 - self.planned)

    def __repr__(self) -> str:
        return (
            f"<{self.id} {self.state.value} row {self.row} computed {self.computed} planned {self.planned} "
            f"length {self.length}/{self.end} leased {self.leased} inflight {self.inflight}>"
        )
