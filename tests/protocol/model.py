"""The protocol of steps and leases as a small machine, to be searched whole (breadth first).

Two sequences, two pages, one worker group, a ring of seven steps.  Anything may die at any moment.  What is
modelled is who may write which page when, and who believes what; tokens are left out.

    scheduler   up or down; for each sequence the pages it holds; the unacknowledged steps; whether a
                worker is attached, and whether it has declared its leases to kv
    worker      down, ready (in no step), attached, or inside a step, writing that step's pages
    kv          up or down; for each page its owner, which stands in the arena and survives;
                whether the leases have been declared since its or the scheduler's start

Rules that make it safe are named; a test takes each away and sees the machine go wrong:

    ack         a page is given back only when no unacknowledged step names its sequence
    ready       a scheduler that starts attaches and declares only once the worker says it is in no step
    declare     kv grants nothing between a restart and the declaration
    fence       what a dead worker had is passed on only when the group is gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

RULES = frozenset({"ack", "ready", "declare", "fence"})
SEQUENCES = (0, 1)
PAGES = (0, 1)
FREE = -1
MAX_STEPS = 7
MAX_DEATHS = 3

DOWN, READY, ATTACHED, IN_STEP = "down", "ready", "attached", "in step"


class State(NamedTuple):
    scheduler_up: bool
    holds: tuple[frozenset[int], ...]  # by sequence: pages, as the scheduler knows them
    wants_out: tuple[bool, ...]  # by sequence: cancelled or finished, to be released
    steps: tuple[tuple[int, frozenset[int]], ...]  # unacknowledged: (sequence, pages it writes)
    attached: bool  # the scheduler's belief
    worker: str
    writing: tuple[int, frozenset[int]]  # the step inside the worker: (sequence, pages)
    zombie: tuple[int, frozenset[int]]  # a group that was given up and is not gone yet: it may still write
    kv_up: bool
    owner: tuple[int, ...]  # by page: sequence or FREE; stands in the arena
    declared: bool
    deaths: int


NOBODY: tuple[int, frozenset[int]] = (FREE, frozenset())
START = State(
    True,
    (frozenset(), frozenset()),
    (False, False),
    (),
    False,
    READY,
    NOBODY,
    NOBODY,
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
    may_grant = s.declared or "declare" not in rules
    for q in SEQUENCES:
        if may_grant and not s.wants_out[q]:
            for page in PAGES:
                # A kv that has forgotten (no declaration) takes what nobody seems to hold.
                seems_free = s.owner[page] == FREE or (not s.declared and "declare" not in rules)
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
    is_settled = s.worker != IN_STEP and s.zombie == NOBODY
    if not s.declared and ("declare" in rules) and (s.attached or is_settled or "ready" not in rules):
        kept = tuple(o if o != FREE and p in s.holds[o] else FREE for p, o in enumerate(s.owner))
        yield "declare", s._replace(owner=kept, declared=True)


def _steps(s: State, rules: frozenset[str]) -> Iterator[tuple[str, State]]:
    for q in SEQUENCES:
        if s.holds[q] and not s.wants_out[q]:
            if s.attached and len(s.steps) < MAX_STEPS:
                yield f"publish {q}", s._replace(steps=(*s.steps, (q, s.holds[q])))
            yield f"cancel {q}", s._replace(wants_out=_put(s.wants_out, q, True))
    can_attach = s.worker == READY and not s.attached
    if can_attach and (s.zombie == NOBODY or "fence" not in rules):
        yield "attach", s._replace(attached=True, worker=ATTACHED)


def _worker(s: State) -> Iterator[tuple[str, State]]:
    if s.worker == ATTACHED and s.steps and s.attached:
        yield "begin", s._replace(worker=IN_STEP, writing=s.steps[0])
    if s.worker == IN_STEP:
        # The done counter stands in the arena: a scheduler that has started afresh ignores it.
        rest = s.steps[1:] if s.steps and s.steps[0] == s.writing else s.steps
        yield "finish", s._replace(worker=ATTACHED if s.attached else READY, writing=NOBODY, steps=rest)
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
                declared=False,
            ),
        )
    if s.worker != DOWN:
        yield "worker dies", died._replace(worker=DOWN, writing=NOBODY, attached=False)
        # Stalled, and given up: it is killed, and until it is gone it may wake up and write on.
        if s.worker == IN_STEP and s.zombie == NOBODY:
            yield "worker stalls", died._replace(worker=DOWN, writing=NOBODY, zombie=s.writing, attached=False)
    if s.kv_up:
        yield "kv dies", died._replace(kv_up=False, declared=False)


def _returns(s: State, rules: frozenset[str]) -> Iterator[tuple[str, State]]:
    if not s.scheduler_up:
        yield "scheduler returns", s._replace(scheduler_up=True)
    if s.worker == DOWN:
        yield "worker returns", s._replace(worker=READY)
    if not s.kv_up:
        yield "kv returns", s._replace(kv_up=True)
    if s.zombie != NOBODY:
        yield "zombie is gone", s._replace(zombie=NOBODY)


def _put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def broken(s: State) -> str:
    """Which invariant does not hold; "" when all do."""
    if s.worker == IN_STEP or s.zombie != NOBODY:
        for sequence, pages in (s.writing, s.zombie):
            for page in pages:
                if s.owner[page] not in (sequence, FREE):
                    return f"page {page} is written for {sequence} and leased to {s.owner[page]}"
    if s.scheduler_up and s.declared:
        for q in SEQUENCES:
            for page in s.holds[q]:
                if s.owner[page] != q:
                    return f"the scheduler holds page {page} for {q}, kv leased it to {s.owner[page]}"
    return ""


def search(rules: frozenset[str] = RULES) -> tuple[int, list[str]]:
    """(states seen, the shortest way to a broken one; empty when there is none)."""
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
