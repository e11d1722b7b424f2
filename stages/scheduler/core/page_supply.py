"""Page supply: kv's answers, retries of denied requests, and preemption when pages run out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.protocol.messages import Denied, Granted, KvReady, KvState
from stages.scheduler.core.leases import BadTableError, Leases
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.sequence_table import SequenceTable, age
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.draft.draft_pool import DraftPool
from stages.scheduler.policy.admission import Limits
from stages.scheduler.stats import Stats


class PageSupply:
    """Pages of one model's sequences, and kv's state as far as the engine depends on it."""

    def __init__(
        self,
        limits: Limits,
        worker: WorkerLink,
        table: SequenceTable,
        leases: Leases,
        drafts: DraftPool,
        stats: Stats,
    ) -> None:
        self.is_short = False  # kv has denied first pages: none are requested until pages are released
        self._limits = limits
        self._worker = worker
        self._table = table
        self._leases = leases
        self._drafts = drafts
        self._stats = stats
        self._generation = -1  # of the KV arena's contents
        table.on_pages_released = self.retry

    # -------------------------------------------------------------- answers

    def granted(self, frame: Granted) -> None:
        """Pages from kv."""
        pending = self._leases.pop_request(frame.id)
        if pending is None or self._worker.ring is None:
            self._stats.late += 1
            return
        draft = self._drafts.find(pending.run.lease_id)
        if draft is not None:
            self._drafts.store_pages(draft, frame, pending.is_first)
            return
        sequence = self._table.by_lease[pending.run.lease_id]
        run = sequence.run
        before = len(run.pages)
        try:
            self._leases.store_table(run, frame)
        except BadTableError as error:
            if not sequence.is_done:
                self._table.fail(sequence, "CACHE", f"page table refused: {error}")
            return
        self._worker.ring.write_table(run.row, before, run.pages[before:])
        if not pending.is_first:
            return
        run.computed = run.planned = run.committed = frame.cached_tokens
        if not sequence.outputs and not sequence.has_emitted:
            sequence.cached_tokens = min(frame.cached_tokens, sequence.prompt_len)
            self._stats.record_cached(sequence.prompt_len, sequence.cached_tokens)
        self._table.begin_prefill(sequence)

    def denied(self, frame: Denied) -> None:
        """kv has no pages now, will never have enough, or does not recognise a lease (id 0)."""
        if not frame.id:
            self._lost_lease(frame.sequence)
            return
        pending = self._leases.pop_request(frame.id)
        if pending is None:
            self._stats.late += 1
            return
        draft = self._drafts.find(pending.run.lease_id)
        if draft is not None:
            self._drafts.dismiss(draft)
            return
        if not pending.is_first and self._leases.retry_later(pending.run):
            return
        self._drafts.dismiss_all()  # requests go before draft sequences
        sequence = self._table.by_lease[pending.run.lease_id]
        if not frame.fits:
            if not sequence.is_done:  # else a step still computes it, and its end was sent
                self._table.fail(
                    sequence,
                    "INSUFFICIENT_RESOURCES",
                    f"needs {frame.needed_pages} KV pages, the arena has {frame.total_pages}: raise kv_cache_mb",
                )
        elif pending.is_first:
            self._table.preempt(sequence)
            self.is_short = True
        else:
            pending.run.is_starved = True

    def _lost_lease(self, lease_id: str) -> None:
        draft = self._drafts.find(lease_id)
        if draft is not None:
            self._drafts.dismiss(draft)
        sequence = self._table.by_lease.get(lease_id)
        if sequence is not None and not sequence.is_done:
            self._table.preempt(sequence)

    # -------------------------------------------------------------- free pages

    def kv_state(self, frame: KvState) -> None:
        """Numbers of pages, sent by kv after changes and with each heartbeat."""
        self._leases.set_free_pages(frame.free + frame.cached, len(self._table.scheduled))
        self.retry()

    def retry(self) -> None:
        """Pages may be free: repeat denied requests."""
        self.is_short = False
        for sequence in self._table.scheduled:
            run = sequence.run
            if run.is_starved and not run.pending_id and not sequence.is_done:
                run.is_starved = False
                self._leases.extend(run)

    def extend_neighbours(self) -> None:
        """Extend the leases that will need pages soon together with one that needs them now.

        kv and the scheduler are woken once for all of them.
        """
        leases = self._leases
        soon = leases.stride * leases.page_tokens // 2
        for sequence in self._table.scheduled:
            run = sequence.run
            if run.planned <= run.extend_at - soon:
                continue
            if not (run.pending_id or run.is_starved or sequence.is_preempting or sequence.is_done):
                leases.extend(run)

    def preempt_if_starved(self) -> None:
        """If a sequence cannot continue because it has no pages, preempt the `victim` of those that have some.

        One that is in a step of a group that does not respond releases no pages by that: it is left out.
        """
        scheduled, responds = self._table.scheduled, self._table.responds
        if not any(s.run.is_starved and s.run.planned >= s.run.leased and responds(s) for s in scheduled):
            return
        holders = [s for s in scheduled if s.run.pages and (responds(s) or not s.run.inflight)]
        if any(s.is_preempting or s.is_done for s in holders) or len(holders) < 2:
            return  # pages will be released soon, or the last holder waits until kv finds some
        self._stats.preemptions += 1
        self._table.preempt(victim(holders, self._table.live.values()))

    # -------------------------------------------------------------- kv's life

    def kv_ready(self, frame: KvReady) -> bool:
        """kv has the arena. True: the arena has other contents than before, so the worker must attach again."""
        is_new = self._generation not in (-1, frame.generation)
        self._generation = frame.generation
        if is_new:
            for sequence in list(self._table.scheduled):
                self._drop_pages(sequence)
            self._drafts.drop_pages()
        self._limits.kv_pages = frame.pages
        self._limits.page_tokens = frame.page_tokens
        runs = [sequence.run for sequence in self._table.scheduled]
        self._leases.kv_ready(frame, [*runs, *(draft.run for draft in self._drafts.sequences)])
        self.is_short = False
        return is_new

    def _drop_pages(self, sequence: SequenceState) -> None:
        sequence.run.pages = ()
        if not sequence.is_done:
            self._table.preempt(sequence)

    def kv_down(self) -> None:
        """kv is gone: steps continue with the pages that they have."""
        self._leases.kv_down()
        self._drafts.dismiss_all()


def victim(holders: Sequence[SequenceState], live: Iterable[SequenceState]) -> SequenceState:
    """The one of some `live` sequences that is preempted first.

    Each tenant has the places of its live sequences in the order in which all of them have arrived, and its priorities
    decide alone which sequence has which of them.  The holder of the last place goes, so that the one that has the
    first place of all keeps its pages.
    """
    by_tenant: dict[str, list[SequenceState]] = {s.tenant.name: [] for s in holders}
    for sequence in live:
        if sequence.tenant.name in by_tenant:
            by_tenant[sequence.tenant.name].append(sequence)
    places: dict[SequenceState, tuple[float, int]] = {}
    for sequences in by_tenant.values():
        places.update(zip(sorted(sequences, key=age), sorted(s.arrival for s in sequences), strict=True))
    return max(holders, key=places.__getitem__)
