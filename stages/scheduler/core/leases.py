"""Page leases: what was requested from kv, what it granted, and what it must learn after its restart.

One `Acquire` when a sequence gets its row, then an `Extend` for every few pages, ahead of need; `Commit` when pages
have filled; `Release` once no unacknowledged step computes the sequence.  An answer is matched by the request's id.
Answers to forgotten requests (the sequence was released, kv has restarted) are ignored.

Every granted table is checked before a worker may use it: bounds, no page twice, the pages in use unchanged and in
front, enough pages for the cached tokens.  A table that fails a check is never written to the row.

Where layers have a sliding window, their pages that no step reads any more are released with a `Commit`, and pages for
a prompt are requested as it is computed: if every layer has one, a sequence of any length holds `most_pages` at most.
A page table has the pages of all layer groups (shm/layer_groups.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.models.arena_sizes import LEASED_AHEAD, most_pages
from pipeline.protocol.messages import Acquire, Commit, Extend, Frame, Granted, KvReady, Reconcile, Release
from shm.layer_groups import ONE_GROUP, LayerGroups
from shm.pages import first_read
from stages.scheduler.core.run_state import NEVER, RunState

MAX_STRIDE = 128  # positions requested at once, but at least one page
EXTEND_AHEAD = 16  # positions before the end of the lease at which more pages are requested
assert MAX_STRIDE + 2 * EXTEND_AHEAD <= LEASED_AHEAD


class BadTableError(ValueError):
    """A page table that must not reach a worker, with the reason."""


class PendingRequest(NamedTuple):
    """An `Acquire` or `Extend` that kv has not answered."""

    run: RunState
    frame: Acquire | Extend

    @property
    def is_first(self) -> bool:
        """It asks for the first pages of the sequence."""
        return isinstance(self.frame, Acquire)


class Leases:
    """The pages of one model. Frames for kv gather in `frames`, in order."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.frames: list[Frame] = []
        self.is_up = False  # kv has the arena and has reconciled its leases with ours
        self.page_tokens = 0
        self.total_pages = 0
        self.stride = 1  # pages that a request takes beyond the current need: fewer requests if many are free
        self.window = 0  # positions that attention reads in layers with a window; 0: all
        self.groups = ONE_GROUP
        self._step_tokens = 0  # with a window: positions of a step, at most
        self._last_id = 0
        self._pending: dict[int, PendingRequest] = {}  # by id

    @property
    def unanswered(self) -> int:
        """Requests that kv has not answered."""
        return len(self._pending)

    def set_free_pages(self, free_pages: int, sequences: int) -> None:
        """Adapt the stride to the pages that are free or evictable, and the sequences that grow into them."""
        most = max(1, MAX_STRIDE // max(1, self.page_tokens))
        self.stride = max(1, min(most, free_pages // (8 * self.groups.n_groups * max(1, sequences))))

    def set_window(self, window: int, step_tokens: int, groups: LayerGroups = ONE_GROUP) -> None:
        """`window`: positions that attention reads in layers with a window, 0: all. `step_tokens`: of a step, at most.

        `groups`: with several ones only those with a window are released behind it.
        """
        self.window = window
        self.groups = groups
        self._step_tokens = step_tokens if window else 0

    @property
    def ahead(self) -> int:
        """With a window: positions of a prompt for which pages are requested at once. A step, and what follows it."""
        return self._step_tokens + 2 * EXTEND_AHEAD

    def most_pages(self, end: int) -> int:
        """Pages that a sequence of `end` positions holds at once, at most."""
        return most_pages(end, self.window, self._step_tokens, self.page_tokens, self.groups)

    # -------------------------------------------------------------- requests

    def acquire(self, run: RunState, salt: str, sharable: int = -1) -> None:
        """First pages, for all known tokens and a stride more. The tokens must be in the row.

        `sharable`: as in `Acquire`.
        """
        want = min(run.length + self.stride * self.page_tokens, run.end - 1)
        self._last_id += 1
        window, ahead = (self.window, self.ahead) if self.window else (0, 0)
        frame = Acquire(
            self._last_id,
            self.model,
            run.lease_id,
            run.row,
            run.length,
            want,
            salt,
            sharable,
            window,
            ahead,
            *run.owner,
        )
        self._request(run, frame)

    def extend(self, run: RunState) -> None:
        """A stride of more pages, up to the sequence's limit."""
        want = run.leased + self.stride * self.page_tokens
        if self.window:
            want = max(want, min(run.length, run.planned + self.ahead))
        want = min(want, run.end - 1)
        run.extend_at = NEVER
        self._last_id += 1
        self._request(run, Extend(self._last_id, self.model, run.lease_id, want))

    def _request(self, run: RunState, frame: Acquire | Extend) -> None:
        run.pending_id = frame.id
        self._pending[frame.id] = PendingRequest(run, frame)
        if self.is_up:
            self.frames.append(frame)

    def commit(self, run: RunState) -> None:
        """Report the computed positions: kv may cache the pages that are full."""
        run.committed = run.computed
        if not run.pages:  # a sequence that is being preempted may have lost them already
            return
        unread = first_read(run.computed, self.window)
        run.n_unread = max(run.n_unread, min(unread // self.page_tokens, self._n_places(run.pages) - 1))
        if self.is_up:
            self.frames.append(Commit(self.model, run.lease_id, min(run.computed, run.valid_end), unread))

    def release(self, run: RunState) -> bool:
        """Return the pages; no step may compute the sequence any more. False: it had none."""
        if not run.pages and not run.pending_id:
            return False
        if run.pending_id:
            self._pending.pop(run.pending_id, None)
            run.pending_id = 0
        # While kv is down nothing is sent: `Reconcile` will list the leases that still exist.
        if self.is_up:
            self.frames.append(Release(self.model, run.lease_id, min(run.computed, run.valid_end)))
        return True

    # -------------------------------------------------------------- answers

    def pop_request(self, request_id: int) -> PendingRequest | None:
        """The request that an answer belongs to; None if it was forgotten."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.run.pending_id = 0
        return pending

    def store_table(self, run: RunState, frame: Granted) -> None:
        """Store the granted table in `run`. Raises `BadTableError`; then nothing is changed."""
        pages, total, groups = frame.pages, self.total_pages, self.groups
        n_leased = self._n_places(pages) * self.page_tokens
        if len(pages) % groups.n_groups:
            raise BadTableError(f"{run.lease_id}: {len(pages)} pages are no whole places of {groups.n_groups}")
        if not 0 <= frame.cached_tokens <= min(run.length - 1, n_leased):
            raise BadTableError(f"{run.lease_id}: {frame.cached_tokens} of {run.length} tokens cached")
        n_unread = run.n_unread if run.pages else first_read(frame.cached_tokens, self.window) // self.page_tokens
        # The request may be older than the last `Commit`, and the answer have pages that are released by now.
        in_use = groups.held(pages, n_unread)
        if len(set(in_use)) != len(in_use):
            raise BadTableError(f"{run.lease_id}: a page is granted twice")
        if any(not 0 <= page < total for page in in_use):
            raise BadTableError(f"{run.lease_id}: a page outside 0..{total - 1} is granted")
        known = groups.held(run.pages, n_unread)
        if in_use[: len(known)] != known:
            raise BadTableError(f"{run.lease_id}: pages in use were replaced")
        run.n_unread = n_unread
        run.pages = pages
        run.leased = min(n_leased, NEVER)
        run.is_starved = False
        run.extend_at = run.leased - self._margin(run) if run.leased < run.end - 1 else NEVER

    def _n_places(self, pages: tuple[int, ...]) -> int:
        return len(pages) // self.groups.n_groups

    def _margin(self, run: RunState) -> int:
        """Positions before the end of the lease at which more pages are requested."""
        is_prompt = self.window and run.leased < run.length  # its next step may need as many positions as this one
        return max(EXTEND_AHEAD, self._step_tokens) if is_prompt else EXTEND_AHEAD

    @staticmethod
    def retry_later(run: RunState) -> bool:
        """An Extend was denied: True if `run` still has pages for a while, and repeats the request then."""
        if run.planned > run.leased - EXTEND_AHEAD:
            return False
        run.extend_at = run.leased - EXTEND_AHEAD
        return True

    # -------------------------------------------------------------- kv's life

    def kv_down(self) -> None:
        """kv is gone: requests stay pending, steps continue with the pages they have."""
        self.is_up = False
        self.frames.clear()  # `Reconcile` to its successor replaces them

    def kv_ready(self, frame: KvReady, runs: Iterable[RunState]) -> None:
        """kv has the arena: send the leases of `runs` if it needs them, then repeat the pending requests."""
        self.page_tokens = frame.page_tokens
        self.total_pages = frame.pages
        if not frame.reconciled:
            held = [run for run in runs if run.pages]
            leases = [
                (run.lease_id, run.row, run.computed, self.groups.without_unread(run.pages, run.n_unread))
                for run in held
            ]
            self.frames.append(Reconcile(self.model, leases, tuple(run.owner for run in held)))
        elif self.is_up:
            return
        # Frames keep their order: kv reads what follows after `Reconcile`.
        self.is_up = True
        self.frames.extend(pending.frame for pending in self._pending.values())
