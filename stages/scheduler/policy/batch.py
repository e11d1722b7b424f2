"""Batch composition: which sequences compute in the next step, and how many positions of each.

Every running stream gets its next token in every step; prompts fill what the step's time budget leaves, in chunks.
With more streams than places (`max_entries`), or more prompts than budget, tenants take turns by virtual time
(queues.py).  Within a tenant the oldest stream goes first, and the prompt that would be complete first if each prompt
had the machine to itself from its arrival on: a short prompt overtakes a long one, by no more than the time that the
long one takes.

The budget is time (pacing.py): predicted cost (cost.py) of tokens and attention positions against the gap between
tokens that running streams may have.  At least one prompt advances in every step, whatever the budget: by
`MIN_PROMPT_CHUNK` tokens, or beside streams by `MIN_CHUNK` where that keeps their gaps and the former does not.
Batches are ragged and nothing is padded, so sequences of different lengths cost each other nothing.

The prompts of a model whose positions attend to those behind them are not cut: each is computed in one step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import NamedTuple, Protocol

from shm.step_ring import MAX_POOLED
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.step import Batch, StepEntry, attention_positions
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.pacing import PacingPolicy
from stages.scheduler.policy.tenant import Tenant

# Prompt tokens that advance in a step whatever the budget says.  A chunk reads K and V before it once, whatever its
# size: one of fewer tokens takes nearly as long, and the cost model, which leaves that out, asks for fewer still.
MIN_CHUNK = 4
MIN_PROMPT_CHUNK = 16  # where no stream waits, or where `MIN_CHUNK` does not keep the streams' gaps either
QUIET_LEAD = 64.0  # tokens (at weight 1) by which the least served tenant is behind to count as quiet
CHUNK_GRAIN = 16  # long chunks that do not end a prompt are multiples of it: whole tiles for the kernels
SMALL_GRAIN = 4  # chunks of `CHUNK_GRAIN` to `LONG_CHUNK` are multiples of it: a whole grain would be much of them
LONG_CHUNK = 4 * CHUNK_GRAIN


class Budget(NamedTuple):
    """Bounds of one step."""

    max_entries: int
    max_tokens: int  # positions computed
    max_samples: int
    pacing: PacingPolicy = PacingPolicy()

    @property
    def spare_samples(self) -> int:
        """Samples beyond one for each entry: for prompt tokens that are scored."""
        return self.max_samples - self.max_entries


class DraftSource(Protocol):
    """Proposes draft tokens; implemented by `Proposer`."""

    def expects_match(self, sequence: SequenceState) -> bool:
        """Leave the sequence out until its pending sample is known: draft tokens will follow it."""

    def propose(self, sequence: SequenceState, room: int) -> tuple[int, ...] | None:
        """At most `room` tokens that may follow the known ones; None: they are still being computed."""


def compose(
    scheduled: list[SequenceState],
    budget: Budget,
    cost: CostModel,
    drafts: DraftSource | None = None,
    may_pause_streams: bool = False,
) -> Batch[SequenceState]:
    """The entries of the next step; `scheduled` in order of age. Changes nothing.

    `may_pause_streams`: streams have advanced in the previous step, and may be left out of this one.

    `drafts` is used only when no prompt is computed and there are enough places: speculation spends what would
    be idle otherwise.
    """
    streams: list[SequenceState] = []
    prompts: list[SequenceState] = []
    positions = 0
    for sequence in scheduled:
        if sequence.is_done or sequence.is_preempting or sequence.draft_tokens or sequence.lacks_mask:
            continue
        run = sequence.run
        planned = run.planned
        known = run.length + run.ahead
        # Not beyond the last wanted token, nor beyond the pages.
        if known >= run.end or planned >= run.leased:
            continue
        todo = known - planned
        if todo == 1 and sequence.pooled is None:
            if sequence.max_tokens:  # otherwise all positions that score are planned
                streams.append(sequence)
                positions += planned + 1
        elif todo > 0:
            prompts.append(sequence)
    if prompts or len(streams) > budget.max_entries:
        return _share(streams, prompts, positions, budget, cost, may_pause_streams)
    return _decode(streams, positions, budget, drafts)


def _decode(
    streams: list[SequenceState], positions: int, budget: Budget, drafts: DraftSource | None
) -> Batch[SequenceState]:
    """All streams fit and no prompt waits: one token each, and draft tokens."""
    entries: list[StepEntry[SequenceState]] = []
    tokens = len(streams)
    spare = budget.max_samples - tokens
    is_waiting = False
    for sequence in streams:
        run = sequence.run
        draft_tokens: tuple[int, ...] = ()
        if drafts is not None and sequence.max_draft_tokens:
            if run.ahead:
                if drafts.expects_match(sequence):
                    tokens -= 1
                    positions -= run.planned + 1
                    continue
                entries.append(StepEntry(sequence, run.planned, 1, 1))
                continue
            # The last draft token needs a position; the sample after it may be the last wanted token.
            room = min(
                spare,
                sequence.max_draft_tokens,
                run.end - run.length - 1,
                run.leased - run.planned - 1,
                budget.max_tokens - tokens,
            )
            proposed = drafts.propose(sequence, room) if room > 0 else ()
            if proposed is None:
                is_waiting = True
                tokens -= 1
                positions -= run.planned + 1
                continue
            draft_tokens = proposed
            spare -= len(draft_tokens)
            tokens += len(draft_tokens)
            positions += len(draft_tokens) * (run.planned + 1)
        count = 1 + len(draft_tokens)
        entries.append(StepEntry(sequence, run.planned, count, count, draft_tokens))
    if is_waiting and all(entry.draft_tokens for entry in entries):
        return Batch([], 0, 0)  # verify all of them in one step, when the last proposal is complete
    return Batch(entries, tokens, positions)


def _share(
    streams: list[SequenceState],
    prompts: list[SequenceState],
    positions: int,
    budget: Budget,
    cost: CostModel,
    may_pause_streams: bool,
) -> Batch[SequenceState]:
    """The general case: places and time are shared by the tenants' virtual time."""
    lines: dict[Tenant, list[SequenceState]] = {}
    for sequence in streams:
        lines.setdefault(sequence.tenant, []).append(sequence)
    if len(prompts) > 1:
        prompts = sorted(prompts, key=lambda s: s.key[0] + cost.token_us * 1e-6 * (s.run.length - s.run.computed))
    for sequence in prompts:
        lines.setdefault(sequence.tenant, []).append(sequence)

    n_streams = min(len(streams), budget.max_entries)
    quiet_us = 0.0  # additional time for the prompt of a quiet tenant
    if n_streams:
        streams_us = cost.predict(n_streams, positions)
        crowd = _crowd(streams, prompts) / n_streams
        prompt_us, quiet_us = budget.pacing.prompt_budget_us(streams_us, cost.alone.p99, cost.beside.p99, crowd)
        longest_us = budget.pacing.gap_bound_us(streams_us, crowd) - streams_us
    else:
        prompt_us = budget.pacing.prefill_budget_us(cost.fixed_us)
        longest_us = 0.0
    prompt_tokens = budget.max_tokens - n_streams
    spare_samples = budget.spare_samples

    queue = [(tenant.served, i, tenant, 0) for i, tenant in enumerate(lines)]
    heapq.heapify(queue)
    quiet: Tenant | None = None
    if len(queue) > 1:
        first, second = heapq.nsmallest(2, queue)
        if first[0] + QUIET_LEAD * first[2].inverse < second[0]:
            quiet = first[2]
    if quiet is not None and may_pause_streams:
        entry = _prompt_step(lines[quiet][0], budget, cost)
        if entry is not None:
            others = [tenant for tenant in lines if tenant is not quiet or len(lines[tenant]) > 1]
            return Batch([entry], entry.count, entry.positions, others, True)
    entries: list[StepEntry[SequenceState]] = []
    unscheduled: list[Tenant] = []
    tokens = positions = samples = n_pooled = 0
    has_chunk = False
    while queue:
        served, i, tenant, place = heapq.heappop(queue)
        line = lines[tenant]
        sequence = line[place]
        run = sequence.run
        start = run.planned
        todo = run.length + run.ahead - start
        is_pooled = sequence.pooled is not None
        if (
            len(entries) >= budget.max_entries
            or samples >= budget.max_samples
            or (is_pooled and n_pooled >= MAX_POOLED)
        ):
            unscheduled.append(tenant)
            continue
        if todo == 1 and not is_pooled:
            count = 1
        else:
            most = min(todo, run.leased - start, prompt_tokens)
            if sequence.scores is not None:
                most = min(most, sequence.scores.longest(start, spare_samples))
            left_us = prompt_us + quiet_us if tenant is quiet else prompt_us
            count = cost.chunk(left_us, start, most)
            if count < most:
                count = whole_grains(count)
            if count < MIN_PROMPT_CHUNK and count < most:
                # The first prompt of a step always advances; the others wait for a step with more time.
                least = MIN_CHUNK if cost.of_chunk(start, MIN_CHUNK) <= longest_us else MIN_PROMPT_CHUNK
                count = 0 if has_chunk else min(max(least, count), most)
            if sequence.pooled is not None and sequence.pooled.is_whole and count < todo:
                count = 0 if has_chunk or most < todo else todo
            if count <= 0:
                unscheduled.append(tenant)
                continue
            prompt_us -= cost.of_chunk(start, count)
            prompt_tokens -= count
            has_chunk = True
        entry = _chunk(sequence, start, count, todo)
        n_pooled += is_pooled
        entries.append(entry)
        count = entry.count
        tokens += count
        samples += entry.samples + entry.scored
        spare_samples -= entry.scored
        positions += attention_positions(start, count)
        if place + 1 < len(line):
            heapq.heappush(queue, (served + count * tenant.inverse, i, tenant, place + 1))
    return Batch(entries, tokens, positions, unscheduled)


def _crowd(streams: list[SequenceState], prompts: list[SequenceState]) -> int:
    """Prompts (not embeddings) that wait behind the first one of their tenant: the fewest of all tenants with streams.

    So the prompts of a tenant never make the gaps of another one's streams longer.
    """
    waiting = Counter(s.tenant for s in prompts if s.pooled is None and s.max_tokens)
    return max(0, min(waiting[tenant] for tenant in {s.tenant for s in streams}) - 1)


def whole_grains(count: int) -> int:
    """`count` prompt tokens or a few less, so that they are whole tiles of the kernels."""
    if count < CHUNK_GRAIN:
        return count
    return count - count % (CHUNK_GRAIN if count >= LONG_CHUNK else SMALL_GRAIN)


def _chunk(sequence: SequenceState, start: int, count: int, todo: int) -> StepEntry[SequenceState]:
    """`count` of the `todo` positions that a sequence has yet to compute; the last one of them is sampled.

    An entry samples or scores: the position that is sampled follows those that score in another step.
    """
    samples = 1 if count == todo and sequence.pooled is None else 0
    scored = sequence.scores.part(start, count)[1] if sequence.scores is not None else 0
    if scored and samples:
        count, samples = count - 1, 0
    return StepEntry(sequence, start, count, samples, (), scored)


def _prompt_step(sequence: SequenceState, budget: Budget, cost: CostModel) -> StepEntry[SequenceState] | None:
    """The rest of a quiet tenant's prompt as a step without streams, if it is short.

    The streams that pause wait no longer than for a step with both, and the tenant's first token arrives earlier by
    the time that the streams' tokens would have taken.
    """
    run = sequence.run
    todo = run.known - run.planned
    if not 1 < todo <= min(run.leased - run.planned, budget.max_tokens):
        return None
    entry = _chunk(sequence, run.planned, todo, todo)
    if entry.scored > budget.spare_samples:
        return None
    return entry if cost.predict(entry.count, entry.positions) <= budget.pacing.quiet_us else None


def compose_alone(sequence: SequenceState, budget: Budget) -> Batch[SequenceState]:
    """A step of one sequence that has work, see recovery/quarantine.py."""
    run = sequence.run
    start = run.planned
    todo = run.known - start
    count = min(todo, run.leased - start, budget.max_tokens)
    if sequence.scores is not None:
        count = min(count, sequence.scores.longest(start, budget.spare_samples))
    entry = _chunk(sequence, start, count, todo)
    return Batch([entry], entry.count, entry.positions)
