"""Who is here: every sequence of a model from its submission to the return of its row and pages.

    live    by id: output is still wanted
    queues  live, without a row
    held    with a row, oldest first: taken up, computing, or over and still named by a step

The outbox gathers what the gateways are to be told.  A sequence's terminal event is written here and
nowhere else, when it leaves `live`, which it does once.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable

from pipeline.protocol.messages import Logprob, Rejected, SequenceTokens, Submit
from stages.scheduler.core.leases import Leases
from stages.scheduler.core.sequence import Sequence, State
from stages.scheduler.policy.admission import Refusal
from stages.scheduler.policy.queues import Queues
from stages.scheduler.stats import Stats

ORPHAN_S = 10.0  # how long a sequence computes on for a gateway that is gone and may come back


class Roster:
    """The sequences of one model, their rows, and the outbox."""

    def __init__(self, queues: Queues, leases: Leases, stats: Stats, n_rows: int) -> None:
        self.queues = queues
        self.leases = leases
        self.stats = stats
        self.live: dict[str, Sequence] = {}
        self.held: list[Sequence] = []
        self.moved: dict[bytes, list[SequenceTokens]] = {}  # by gateway
        self.rejected: list[tuple[bytes, Rejected]] = []
        # First in, first out: whoever still looks at an old row has the longest time to notice.
        self.free_rows: deque[int] = deque(range(n_rows))
        self.on_freed: Callable[[], None] = lambda: None  # pages have gone back
        self._order = 0
        self._ticket = 0
        self._deadlines: list[tuple[float, int, Sequence]] = []

    # -------------------------------------------------------------- coming

    def enter(self, owner: bytes, frame: Submit, now: float) -> Sequence:
        """A new sequence, live, neither waiting nor held yet. Its id is not live."""
        self._order += 1
        sequence = Sequence(frame, owner, self.queues.tenant(frame.tenant), now, self._order)
        if any(s.lease == sequence.lease for s in self.held):
            sequence.lease = f"{sequence.id}~{self._order}"
        self.live[sequence.id] = sequence
        self.stats.submitted += 1
        if sequence.deadline < math.inf:
            self._remind(sequence.deadline, sequence)
        return sequence

    def hold(self, sequence: Sequence) -> None:
        """Give a row to a sequence that was taken out of its queue."""
        sequence.row = self.free_rows.popleft()
        sequence.tenant.held += 1
        insort(self.held, sequence, key=_age)

    # -------------------------------------------------------------- telling

    def emit(
        self,
        sequence: Sequence,
        start: int,
        tokens: tuple[int, ...],
        logprobs: tuple[Logprob, ...] = (),
        finish: str = "",
        error: str = "",
        message: str = "",
    ) -> None:
        """To its gateway: output tokens from output index `start`, and how it ends if it does."""
        if not sequence.owner:
            return
        cached = 0 if sequence.is_announced else sequence.cached_tokens
        sequence.is_announced = True
        moved = SequenceTokens(sequence.id, start, tokens, logprobs, finish, error, message, cached, sequence.accepted)
        gathered = self.moved.get(sequence.owner)
        if gathered is None:
            self.moved[sequence.owner] = [moved]
        else:
            gathered.append(moved)

    # -------------------------------------------------------------- ending

    def finish(
        self,
        sequence: Sequence,
        reason: str,
        *,
        error: str = "",
        message: str = "",
        start: int = -1,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[Logprob, ...] = (),
    ) -> None:
        """The terminal event of a live sequence, with its last tokens. Row and pages go when they can."""
        self.emit(sequence, sequence.outputs if start < 0 else start, tokens, logprobs, reason, error, message)
        self.stats.ended(reason, sequence.outputs)
        self._end(sequence, State.FAILED if error else State.FINISHED)

    def reject(self, sequence: Sequence, refusal: Refusal) -> None:
        """The terminal event of a live sequence that is not computed (any further) here and now."""
        if sequence.owner:
            self.rejected.append((sequence.owner, rejection(sequence.id, refusal)))
        self.stats.refused += 1
        self._end(sequence, State.FAILED)

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """The terminal event of a live sequence that cannot go on."""
        self.finish(sequence, "error", error=code, message=message)

    def abandon(self, sequence: Sequence) -> None:
        """End a live sequence without a word: nobody listens, or it has been submitted anew."""
        sequence.owner = b""
        self.finish(sequence, "cancelled")

    def _end(self, sequence: Sequence, state: State) -> None:
        sequence.move(state)
        sequence.is_over = True
        del self.live[sequence.id]
        if sequence in self.queues:
            self.queues.remove(sequence)
        elif sequence.row >= 0 and sequence.inflight == 0:
            self.let_go(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Return row and pages of a held sequence that no step names."""
        is_freeing = self.leases.release(sequence)
        self.held.remove(sequence)
        self.free_rows.append(sequence.row)
        sequence.row = -1
        sequence.tenant.held -= 1
        if is_freeing:
            self.on_freed()

    def set_aside(self, sequence: Sequence) -> None:
        """Back to the queue: a live, held sequence that no step names gives up row and pages.

        It will be computed again from its tokens, which makes the same ones follow.
        """
        sequence.is_leaving = False
        self.let_go(sequence)
        sequence.reset()
        if sequence.state is not State.PENDING:
            sequence.move(State.PENDING)
        self.queues.push(sequence)

    # -------------------------------------------------------------- owners and time

    def adopt(self, owner: bytes, frame: Submit) -> bool:
        """A submission of a live id: True if what is under way serves it, from there on to `owner`.

        So a gateway that restarts loses nothing that was computed meanwhile.  It must be the same
        request, have got no further than the known output, and want no logprobs (they are not kept).
        """
        sequence = self.live[frame.sequence]
        forced = array("i")
        forced.frombytes(frame.forced)
        prompt = sequence.tokens[: sequence.prompt_len]
        got = len(forced)
        if (
            frame.sampling.logprobs >= 0
            or prompt.tobytes() != frame.prompt
            or sequence.sampling != frame.sampling
            or sequence.max_tokens != frame.max_tokens
            or sequence.stop_ids != frozenset(frame.stop_ids)
            or sequence.tokens[sequence.prompt_len : sequence.prompt_len + got] != forced
            or got > sequence.outputs
        ):
            return False
        sequence.owner = owner
        sequence.is_announced = False
        if got < sequence.outputs:
            self.emit(sequence, got, tuple(sequence.tokens[sequence.prompt_len + got :]))
        return True

    def orphan(self, owner: bytes, now: float) -> None:
        """The gateway `owner` is gone: its sequences have `ORPHAN_S` to be asked for again."""
        for sequence in self.live.values():
            if sequence.owner == owner:
                sequence.owner = b""
                self._remind(now + ORPHAN_S, sequence)
        self.moved.pop(owner, None)
        self.rejected = [(to, frame) for to, frame in self.rejected if to != owner]

    def _remind(self, when: float, sequence: Sequence) -> None:
        self._ticket += 1
        heapq.heappush(self._deadlines, (when, self._ticket, sequence))

    def expire(self, now: float) -> None:
        """End those whose time is over, and orphans nobody has asked for."""
        if len(self._deadlines) > 64 + 4 * len(self.live):
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_over]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.is_over:
                continue
            if now >= sequence.deadline:
                where = "waiting" if sequence.state is State.PENDING else "computing"
                self.finish(
                    sequence,
                    "timeout",
                    error="TIMEOUT",
                    message=f"the request's time was over after {now - sequence.arrived:.1f} s ({where}, "
                    f"{sequence.outputs} tokens of output)",
                )
            elif not sequence.owner:
                self.abandon(sequence)


def rejection(sequence_id: str, refusal: Refusal) -> Rejected:
    return Rejected(sequence_id, refusal.code, refusal.message, refusal.param, refusal.retry_after_s)


def _age(sequence: Sequence) -> tuple[float, int]:
    return sequence.key
