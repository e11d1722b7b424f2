"""Model of the step and lease protocol: a state machine that is small enough for a complete search.

Two sequences, two pages, one worker group, a ring of seven steps.  Every process may die at any time.  The model
contains which process may write which page at what time, and what each process believes; it leaves out tokens.

    scheduler   up or down; the pages that each sequence holds; the unacknowledged steps; whether a worker is
                attached, and whether kv's leases have been reconciled with the scheduler's
    worker      down, ready (in no step), attached, or in a step, writing that step's pages
    kv          up or down; the owner of each page, which is stored in the arena and survives; whether the leases
                have been reconciled since kv or the scheduler has started

The rules that make the protocol safe have names.  The test leaves out each of them and finds a broken invariant:

    ack         a page is released only when no unacknowledged step contains its sequence
    ready       a scheduler that starts attaches and reconciles only after the worker reports that it is in no step
    reconcile   kv grants no page between a restart and the reconciliation
    fence       a dead worker group's arenas are passed on only after all its processes have exited
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

RULES = frozenset({"ack", "ready", "reconcile", "fence"})
SEQUENCES = (0, 1)
PAGES = (0, 1)
FREE = -1
MAX_STEPS = 7
MAX_DEATHS = 3

DOWN, READY, ATTACHED, IN_STEP = "down", "ready", "attached", "in step"


class State(NamedTuple):
    """One state of the machine."""

    scheduler_up: bool
    holds: tuple[frozenset[int], ...]  # by sequence: pages, in the scheduler's state
    wants_out: tuple[bool, ...]  # by sequence: cancelled or finished, to be released
    steps: tuple[tuple[int, frozenset[int]], ...]  # unacknowledged: (sequence, pages it writes)
    attached: bool  # as the scheduler believes
    worker: str
    writing: tuple[int, frozenset[int]]  # the step inside the worker: (sequence, pages)
    zombie: tuple[int, frozenset[int]]  # a killed group that has not exited yet: it may still write
    kv_up: bool
    owner: tuple[int, ...]  # by page: sequence or FREE; stored in the arena
    reconciled: bool
    deaths: int


NO_STEP: tuple[int, frozenset[int]] = (FREE, frozenset())
START = State(
    True,
    (frozenset(), frozenset()),
    (False, False),
    (),
    False,
    READY,
    NO_STEP,
    NO_STEP,
    True,
    (FREE, FREE),
    True,
    0,
)


def successors(s: State, rules: frozenset[str]) -> Iterator[tuple[str, State]]:
    """Every event that can happen next."""
    if s.scheduler_up and s.kv_up:
        yield from _leases(s, rules)
    if s.scheduler_up:
        yield from _steps(s, rules)
    yield from _worker(s)
    if s.deaths < MAX_DEATHS:
        yield from _deaths(s, rules)
    yield from _returns(s, rules)


def _leases(s: State, rules: frozenset[str]) -> Iterator[tuple[str, State]]:
    may_grant = s.reconciled or "reconcile" not in rules
    for q in SEQUENCES:
        if may_grant and not s.wants_out[q]:
            for page in PAGES:
                # Without reconciliation kv grants pages that other sequences hold.
                seems_free = s.owner[page] == FREE or (not s.reconciled and "reconcile" not in rules)
                if seems_free and len(s.holds[q]) < 2 and page not in s.holds[q]:
                    yield (
                        f"grant {page} to {q}",
                        s._replace(holds=_put(s.holds, q, s.holds[q] | {page}), owner=_put(s.owner, page, q)),
                    )
        named = any(q == step[0] for step in s.steps)
        if s.wants_out[q] and s.holds[q] and (not named or "ack" not in rules):
            freed = tuple(FREE if o == q else o for o in s.owner)
            yield (
                f"release {q}",
                s._replace(holds=_put(s.holds, q, frozenset()), owner=freed, wants_out=_put(s.wants_out, q, False)),
            )
    is_settled = s.worker != IN_STEP and s.zombie == NO_STEP
    if not s.reconciled and ("reconcile" in rules) and (s.attached or is_settled or "ready" not in rules):
        kept = tuple(o if o != FREE and p in s.holds[o] else FREE for p, o in enumerate(s.owner))
        yield "reconcile", s._replace(owner=kept, reconciled=True)


def _steps(s: State, rules: frozenset[str]) -> Iterator[tuple[str, State]]:
    for q in SEQUENCES:
        if s.holds[q] and not s.wants_out[q]:
            if s.attached and len(s.steps) < MAX_STEPS:
                yield f"publish {q}", s._replace(steps=(*s.steps, (q, s.holds[q])))
            yield f"cancel {q}", s._replace(wants_out=_put(s.wants_out, q, True))
    can_attach = s.worker == READY and not s.attached
    if can_attach and (s.zombie == NO_STEP or "fence" not in rules):
        yield "attach", s._replace(attached=True, worker=ATTACHED)


def _worker(s: State) -> Iterator[tuple[str, State]]:
    if s.worker == ATTACHED and s.steps and s.attached:
        yield "begin", s._replace(worker=IN_STEP, writing=s.steps[0])
    if s.worker == IN_STEP:
        # The done counter is stored in the arena: a scheduler that has just started ignores it.
        rest = s.steps[1:] if s.steps and s.steps[0] == s.writing else s.steps
        yield "finish", s._replace(worker=ATTACHED if s.attached else READY, writing=NO_STEP, steps=rest)
    if s.worker == ATTACHED and not s.attached:
        yield "detach", s._replace(worker=READY)


def _deaths(s: State, rules: frozenset[str]) -> Iterator[tuple[str, State]]:
    died = s._replace(deaths=s.deaths + 1)
    if s.scheduler_up:
        yield (
            "scheduler dies",
            died._replace(
                scheduler_up=False,
                holds=(frozenset(), frozenset()),
                wants_out=(False, False),
                steps=(),
                attached=False,
                reconciled=False,
            ),
        )
    if s.worker != DOWN:
        yield "worker dies", died._replace(worker=DOWN, writing=NO_STEP, attached=False)
        # A stalled group is killed; until it has exited it may continue to write.
        if s.worker == IN_STEP and s.zombie == NO_STEP:
            yield "worker stalls", died._replace(worker=DOWN, writing=NO_STEP, zombie=s.writing, attached=False)
    if s.kv_up:
        yield "kv dies", died._replace(kv_up=False, reconciled=False)


def _returns(s: State, rules: frozenset[str]) -> Iterator[tuple[str, State]]:
    if not s.scheduler_up:
        yield "scheduler returns", s._replace(scheduler_up=True)
    if s.worker == DOWN:
        yield "worker returns", s._replace(worker=READY)
    if not s.kv_up:
        yield "kv returns", s._replace(kv_up=True)
    if s.zombie != NO_STEP:
        yield "zombie has exited", s._replace(zombie=NO_STEP)


def _put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def broken(s: State) -> str:
    """The invariant that does not hold; "" if all hold."""
    if s.worker == IN_STEP or s.zombie != NO_STEP:
        for sequence, pages in (s.writing, s.zombie):
            for page in pages:
                if s.owner[page] not in (sequence, FREE):
                    return f"page {page} is written for {sequence} and leased to {s.owner[page]}"
    if s.scheduler_up and s.reconciled:
        for q in SEQUENCES:
            for page in s.holds[q]:
                if s.owner[page] != q:
                    return f"the scheduler holds page {page} for {q}, kv leased it to {s.owner[page]}"
    return ""


def search(rules: frozenset[str] = RULES) -> tuple[int, list[str]]:
    """(number of reachable states, the shortest path to a broken one or an empty list)."""
    before: dict[State, tuple[State, str] | None] = {START: None}
    queue = deque([START])
    while queue:
        state = queue.popleft()
        if why := broken(state):
            way = [why]
            at = before[state]
            while at is not None:
                way.append(at[1])
                at = before[at[0]]
            return len(before), way[::-1]
        for event, after in successors(state, rules):
            if after not in before:
                before[after] = (state, event)
                queue.append(after)
    return len(before), []
