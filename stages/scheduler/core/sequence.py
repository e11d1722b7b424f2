"""A submitted sequence: its request parameters, its phase and its run state.

    PENDING --> PREFILLING --> DECODING --> FINISHED   all requested tokens, or a stop
       |  ^---------'-------------'  |                 (backwards: preempted, computed again later)
       `-------------> FAILED <------'                 error, time-out

A finished or failed sequence has sent its terminal event.  It keeps its row and pages until no unacknowledged step
computes it.
"""

from __future__ import annotations

import enum
import math
from array import array

from pipeline.protocol.messages import Sampling, Submit
from stages.scheduler.constraints.mask_state import Masks
from stages.scheduler.core.pooled_prompt import SALT, PooledPrompt
from stages.scheduler.core.prompt_scores import PromptScores
from stages.scheduler.core.run_state import RunState
from stages.scheduler.draft.draft_state import DraftState
from stages.scheduler.policy.priority import head_start_s
from stages.scheduler.policy.tenant import Tenant


class Phase(enum.Enum):
    """Where a sequence is in its life."""

    PENDING = "pending"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"


LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.PREFILLING, Phase.FINISHED, Phase.FAILED}),
    Phase.PREFILLING: frozenset({Phase.DECODING, Phase.PENDING, Phase.FINISHED, Phase.FAILED}),
    Phase.DECODING: frozenset({Phase.PENDING, Phase.FINISHED, Phase.FAILED}),
    Phase.FINISHED: frozenset(),
    Phase.FAILED: frozenset(),
}


class IllegalTransitionError(RuntimeError):
    """A bug in the scheduler: a sequence cannot pass from its phase to the given one."""


class SequenceState:
    """One submitted sequence.

    `key` orders a tenant's queue (lower first) and never changes, so a preempted sequence stays older than every
    sequence that was submitted after it.
    """

    __slots__ = (
        "__weakref__",
        "accepted",
        "acquired_at",
        "adapter",
        "arrival",
        "arrived",
        "breakers",
        "cached_tokens",
        "choice",
        "constraint",
        "deadline",
        "dedup_leader",
        "dedup_tokens",
        "detached_until",
        "draft_state",
        "draft_tokens",
        "gateway",
        "has_emitted",
        "id",
        "is_done",
        "is_preempting",
        "key",
        "lacks_mask",
        "masks",
        "max_draft_tokens",
        "max_tokens",
        "model",
        "phase",
        "pooled",
        "prediction",
        "prompt_len",
        "request",
        "revision",
        "run",
        "salt",
        "sampling",
        "scores",
        "started",
        "stop_ids",
        "suspect_count",
        "tenant",
    )

    def __init__(self, frame: Submit, gateway: bytes, tenant: Tenant, now: float, order: int) -> None:
        """`order` numbers the submissions of a model."""
        tokens = array("i")
        tokens.frombytes(frame.prompt)
        self.prompt_len = len(tokens)
        tokens.frombytes(frame.forced)
        self.run = RunState(frame.sequence, tokens, self.prompt_len + max(1, frame.max_tokens))
        self.run.owner = (tenant.name, frame.session)
        self.id: str = frame.sequence
        self.request: str = frame.request
        self.model: str = frame.model  # the version, for log lines
        self.gateway = gateway  # connection of the gateway that receives the output, b"": none does
        self.detached_until = math.inf  # s: without a gateway until then it is cancelled
        self.tenant = tenant
        self.max_tokens: int = frame.max_tokens
        self.sampling: Sampling = frame.sampling
        self.choice: int = frame.choice
        self.breakers: bytes = frame.breakers
        self.prediction: bytes = frame.prediction
        self.revision: int = frame.revision
        self.constraint = frame.constraint
        self.masks: Masks | None = None  # of a live sequence with a constraint
        self.acquired_at = now  # s: when pages were requested for its row
        self.lacks_mask = False  # it is not computed until its token mask is there
        self.stop_ids = frozenset(frame.stop_ids)
        self.salt: str = frame.cache_salt
        self.adapter: str = frame.adapter
        self.pooled: PooledPrompt | None = None  # what it computes instead of output
        if frame.pooling:
            self.pooled, self.salt = PooledPrompt(frame.pooling, self.prompt_len), SALT
            self.run.valid_end = 0
        self.scores: PromptScores | None = None  # of a prompt whose tokens are scored
        if frame.prompt_logprobs >= 0:
            self.scores = PromptScores(frame.prompt_logprobs, self.prompt_len, frame.scored)
        self.deadline = now + frame.deadline_ms / 1000 if frame.deadline_ms > 0 else math.inf
        self.arrived = now
        self.arrival = (now, order)  # of the first revision of its stream
        self.started = 0.0  # when its first step was published
        self.key = (now - head_start_s(frame.priority, self.deadline - now), order)
        self.phase = Phase.PENDING
        self.is_done = False  # finished or failed: no output is wanted any more
        self.has_emitted = False  # its first tokens (with cached_tokens) have been sent
        self.suspect_count = 0  # see recovery/quarantine.py
        self.max_draft_tokens: int = frame.speculate  # in one step
        self.draft_state: DraftState | None = None
        self.accepted = 0  # draft tokens
        self.cached_tokens = 0
        self._reset()

    def _reset(self) -> None:
        self.is_preempting = False  # to be preempted as soon as no step computes it
        self.draft_tokens: tuple[int, ...] = ()  # that the published step verifies
        self.dedup_leader: SequenceState | None = None  # it computes a common prefix, see policy/prefix_dedup.py
        self.dedup_tokens = 0  # length of that prefix

    def reset(self) -> None:
        """Back to a sequence without pages, of which only the tokens are kept."""
        self._reset()
        self.run.reset()
        if self.pooled is not None:
            self.pooled.reset()

    def enter_phase(self, phase: Phase) -> None:
        """Raises `IllegalTransitionError`."""
        if phase not in LEGAL[self.phase]:
            raise IllegalTransitionError(f"{self.id}: {self.phase.value} -> {phase.value}")
        self.phase = phase

    @property
    def sharable(self) -> int:
        """Leading positions that kv may share with other sequences; -1: all but the last."""
        return -1 if self.scores is None or self.scores.is_complete else self.scores.sharable

    @property
    def session(self) -> str:
        """Whose turn it is; "": none."""
        return self.run.owner[1]

    @property
    def outputs(self) -> int:
        """Known output tokens."""
        return self.run.length - self.prompt_len

    def __repr__(self) -> str:
        return f"<{self.id} {self.phase.value} {self.run!r}>"
