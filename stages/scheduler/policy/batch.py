"""Who computes: the entries of one step.

Every running stream gets its next token in every step; prompts fill what the step's time budget
leaves, in chunks.  With more streams than places (`max_entries`), or more prompts than budget, tenants
take turns by virtual time (queues.py).  Within a tenant the oldest stream goes first, and the
prompt that would be through first if each had the machine from its arrival on: a short one
overtakes a long one, by no more than the time the long one takes.

The budget is time: predicted cost (cost.py), tokens and attention positions together, against the gap that
running streams may have.  Whatever it says, some prompt advances by `MIN_CHUNK` in every step.
Batches are ragged, nothing is padded: sequences of unlike length cost each other nothing, and "similar
length" (seed 000) needs no sorting beyond what the budget does.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stages.scheduler.core.sequence import Sequence
from stages.scheduler.policy.cost import CostModel
from stages.scheduler.policy.queues import Tenant

MIN_CHUNK = 16  # prompt tokens that advance in a step whatever the budget says
BEHIND = 64.0  # tokens (at weight 1) that make the least served tenant a quiet one
CHUNK_GRAIN = 16  # chunks that do not end a prompt are multiples of it: whole tiles for the kernels


@dataclass(slots=True)
class Entry:
    """Positions [start, start + count) of a sequence; the last `samples` of them are sampled."""

    sequence: Sequence
    start: int
    count: int
    samples: int
    drafts: tuple[int, ...] = ()  # tokens guessed for the positions after `start`, to be verified


class Budget(NamedTuple):
    """Bounds of one step."""

    max_entries: int
    max_tokens: int  # positions computed
    max_samples: int
    gap_factor: float = 3.0  # a step with prompt tokens may take this many times one without them,
    gap_us: float = 25_000.0  # or this long, if that is more
    margin: float = 0.6  # of both, usually: predictions err, and the 95th percentile counts as well
    quiet_margin: float = 0.95  # for the prompt of a tenant that has had little: it must not wait twice,
    quiet_us: float = 35_000.0  # and a step with it may take so long
    prompt_us: float = 60_000.0  # a step in which nobody decodes: bounds what an arrival waits


class Batch(NamedTuple):
    """A composed step. `left` are tenants with work that found no place; `stalls`: streams stand still in it."""

    entries: list[Entry]
    tokens: int
    positions: int
    left: list[Tenant]
    stalls: bool = False


class Guesses(Protocol):
    """Where draft tokens come from."""

    def awaits(self, sequence: Sequence) -> bool:
        """Hold the sequence back until its sample under way is known: drafts will follow it."""

    def draft(self, sequence: Sequence, room: int) -> tuple[int, ...] | None:
        """At most `room` tokens that may follow the known ones; None: they are being thought about."""


def compose(
    held: list[Sequence], budget: Budget, cost: CostModel, guesses: Guesses | None = None, may_stall: bool = False
) -> Batch:
    """The next step's entries; `held` in order of age. Nothing is changed.

    `may_stall`: streams have advanced in the step before, and may stand still in this one.

    `guesses` is asked only when no prompt is under way and places are enough: speculation spends
    what would lie idle.
    """
    streams: list[Sequence] = []
    prompts: list[Sequence] = []
    positions = 0
    for sequence in held:
        if sequence.is_over or sequence.is_leaving or sequence.drafts:
            continue
        planned = sequence.planned
        known = sequence.length + sequence.ahead
        # Not beyond the last wanted token, nor beyond the pages.
        if known >= sequence.end or planned >= sequence.leased:
            continue
        todo = known - planned
        if todo == 1:
            streams.append(sequence)
            positions += planned + 1
        elif todo > 1:
            prompts.append(sequence)
    if prompts or len(streams) > budget.max_entries:
        return _share(streams, prompts, positions, budget, cost, may_stall)
    entries: list[Entry] = []
    tokens = len(streams)
    spare = budget.max_samples - tokens
    is_waiting = False
    for sequence in streams:
        drafts: tuple[int, ...] = ()
        if guesses is not None and sequence.speculate:
            if sequence.ahead:
                if guesses.awaits(sequence):
                    tokens -= 1
                    positions -= sequence.planned + 1
                    continue
                entries.append(Entry(sequence, sequence.planned, 1, 1))
                continue
            # The last draft needs a position; the sample after it may be the last wanted token.
            room = min(
                spare,
                sequence.speculate,
                sequence.end - sequence.length - 1,
                sequence.leased - sequence.planned - 1,
                budget.max_tokens - tokens,
            )
            found = guesses.draft(sequence, room) if room > 0 else ()
            if found is None:
                is_waiting = True
                tokens -= 1
                positions -= sequence.planned + 1
                continue
            drafts = found
            spare -= len(drafts)
            tokens += len(drafts)
            positions += len(drafts) * (sequence.planned + 1)
        count = 1 + len(drafts)
        entries.append(Entry(sequence, sequence.planned, count, count, drafts))
    if is_waiting and all(entry.drafts for entry in entries):
        return Batch([], 0, 0, [])  # all will be verified in one step
    return Batch(entries, tokens, positions, [])


def _share(
    streams: list[Sequence], prompts: list[Sequence], positions: int, budget: Budget, cost: CostModel, may_stall: bool
) -> Batch:
    """The general case: places and budget go round by tenants' virtual time."""
    lines: dict[Tenant, list[Sequence]] = {}
    for sequence in streams:
        lines.setdefault(sequence.tenant, []).append(sequence)
    if len(prompts) > 1:
        prompts = sorted(prompts, key=lambda s: s.key[0] + cost.token_us * 1e-6 * (s.length - s.computed))
    for sequence in prompts:
        lines.setdefault(sequence.tenant, []).append(sequence)

    n_streams = min(len(streams), budget.max_entries)
    more_us = 0.0  # on top, for the least served tenant if it is far behind
    if n_streams:
        alone = cost.predict(n_streams, positions)
        allowed = max(budget.gap_us, budget.gap_factor * alone)
        prompt_us = budget.margin * allowed - alone
        more_us = max(budget.quiet_us, budget.quiet_margin * allowed) - budget.margin * allowed
    else:
        prompt_us = budget.prompt_us - cost.fixed_us
    prompt_tokens = budget.max_tokens - n_streams

    turn = [(tenant.served, i, tenant, 0) for i, tenant in enumerate(lines)]
    heapq.heapify(turn)
    quiet: Tenant | None = None
    if len(turn) > 1:
        first, second = heapq.nsmallest(2, turn)
        if first[0] + BEHIND * first[2].inverse < second[0]:
            quiet = first[2]
    if quiet is not None and may_stall:
        entry = _alone(lines[quiet][0], budget, cost)
        if entry is not None:
            others = [tenant for tenant in lines if tenant is not quiet or len(lines[tenant]) > 1]
            return Batch([entry], entry.count, positions_of(entry), others, True)
    entries: list[Entry] = []
    left: list[Tenant] = []
    tokens = positions = samples = 0
    has_chunk = False
    while turn:
        served, i, tenant, place = heapq.heappop(turn)
        line = lines[tenant]
        sequence = line[place]
        start = sequence.planned
        todo = sequence.length + sequence.ahead - start
        if len(entries) >= budget.max_entries or samples >= budget.max_samples:
            left.append(tenant)
            continue
        if todo == 1:
            count = 1
        else:
            most = min(todo, sequence.leased - start, prompt_tokens)
            left_us = prompt_us + more_us if tenant is quiet else prompt_us
            count = cost.chunk(left_us, start, most)
            if count < most and count >= CHUNK_GRAIN:
                count -= count % CHUNK_GRAIN
            if count < MIN_CHUNK and count < most:
                # The first prompt of a step always advances; later ones wait for a better one.
                count = 0 if has_chunk else min(MIN_CHUNK, most)
            if count <= 0:
                left.append(tenant)
                continue
            prompt_us -= cost.token_us * count + cost.position_us * count * (start + 0.5 * count)
            prompt_tokens -= count
            has_chunk = True
        sampled = 1 if count == todo else 0
        entries.append(Entry(sequence, start, count, sampled))
        tokens += count
        samples += sampled
        positions += positions_of(entries[-1])
        if place + 1 < len(line):
            heapq.heappush(turn, (served + count * tenant.inverse, i, tenant, place + 1))
    return Batch(entries, tokens, positions, left)


def _alone(sequence: Sequence, budget: Budget, cost: CostModel) -> Entry | None:
    """All that is left of a prompt as a step of its own, if that is short.

    Those who stand still meanwhile wait no longer than for a step with all of both, and the first token of one who
    has had little comes sooner by what their tokens take.
    """
    start = sequence.planned
    entry = Entry(sequence, start, sequence.length + sequence.ahead - start, 1)
    if not 1 < entry.count <= min(sequence.leased - start, budget.max_tokens):
        return None
    return entry if cost.predict(entry.count, positions_of(entry)) <= budget.quiet_us else None


def positions_of(entry: Entry) -> int:
    """Attention positions."""
    return entry.count * entry.start + entry.count * (entry.count + 1) // 2
