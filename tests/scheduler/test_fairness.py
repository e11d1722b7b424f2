"""Tenants get their shares, no request starves, and running streams keep their pace.

Measured by simulation: the product's engine with computed step times (tools/simulate.py).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.settings import Settings
from stages.scheduler.policy.pacing import PacingPolicy
from stages.scheduler.policy.priority import HEAD_START_S, MAX_HEAD_START_S, head_start_s
from stages.scheduler.policy.queues import QUANTUM, QueueFullError, TenantQueues
from stages.scheduler.policy.tenant import Tenant
from tests.properties import examples
from tools.simulate import Machine, Simulation, closed_loop, main, percentile, poisson, report

from .peers import submission

FAST = Machine(fixed_us=3000, token_us=150, position_us=0.1)


def sequence(queues: TenantQueues, name: str, tenant: str, now: float = 0.0, order: int = 0, priority: int = 0):
    frame = submission(name, [1, 2], 5, tenant=tenant, priority=priority)
    return SequenceState(frame, b"g", queues.tenant(tenant), now, order)


# ------------------------------------------------------------------ shares


@settings(max_examples=examples(20))
@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=4),
    batch=st.integers(4, 24),
)
def test_backlogged_tenants_stay_within_a_quantum_of_their_shares(seed, weights, batch):
    rng = random.Random(seed)
    names = [f"t{i}" for i in range(len(weights))]
    sim = Simulation(Settings("m", batch), FAST, weights=dict(zip(names, weights, strict=True)))
    n = 0
    for name in names:
        for _ in range(60):
            n += 1
            sim.submit(rng.random() * 0.01, f"s{n}", rng.randrange(1, 300), rng.randrange(1, 60), name)
    tenants = sim.engine.queues.tenants
    apart = []

    def look() -> None:
        # Tokens computed for each tenant while all of them had sequences waiting.
        if all(tenants[name].waiting for name in names):
            served = [tenants[name].computed / tenants[name].weight for name in names]
            apart.append(max(served) - min(served))
            sim.at(sim.now + 0.01, look)

    sim.at(0.02, look)
    sim.run()
    assert apart
    assert max(apart) <= QUANTUM + max(150 / w for w in weights) + sim.engine.steps.budget.max_tokens
    assert all(r.finish == "length" for r in sim.records.values())


def test_a_flood_at_most_doubles_the_others_time_to_first_token():
    def firsts(flood: int) -> float:
        sim = Simulation(Settings("m", 16), FAST)
        for i in range(flood):
            sim.submit(0.001 * i, f"flood{i}", 100, 64, "flood")
        rng = random.Random(1)  # at random times within the flood's steps
        for i in range(40):
            sim.submit(0.5 + 0.1 * (i + rng.random()), f"s{i}", 100, 8, "quiet")
        sim.run()
        return statistics.median(sim.records[f"s{i}"].first_s for i in range(40))

    assert firsts(700) <= 2 * firsts(0)


def test_running_streams_keep_their_pace_while_a_long_prompt_arrives():
    sim = Simulation(Settings("m", 16), Machine())
    for i in range(8):
        sim.submit(0.0, f"s{i}", 100, 600)
    sim.submit(1.5, "long", 4000, 4)
    sim.run()
    until = sim.records["long"].tokens[0]
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for i in range(8):
        tokens = sim.records[f"s{i}"].tokens
        for a, b in pairwise(tokens):
            if a > 1.0:
                gaps[1.5 < a < until].append(b - a)
    usual = max(PacingPolicy().wake_s, percentile(gaps[False], 0.5))
    assert percentile(gaps[True], 0.99) <= 3 * usual
    assert until - 1.5 < 5.0, "the long prompt must advance"


LONG_PROMPTS = {  # machine, streams, tokens of the long prompt, seconds that it may take
    "small model": (Machine(), 1, 8000, 10.0),
    "small model, varying times": (Machine(jitter=0.1), 1, 8000, 10.0),
    "small model, very long prompt": (Machine(), 1, 20_000, 60.0),
    "small model, 16 streams": (Machine(jitter=0.1), 16, 4000, 6.0),
    "large model": (Machine(50_000.0, 3300.0, 0.65), 1, 8000, 100.0),
    "large model, varying times": (Machine(50_000.0, 3300.0, 0.65, jitter=0.1), 1, 8000, 120.0),
    "large model, 8 streams": (Machine(50_000.0, 3300.0, 0.65, jitter=0.1), 8, 2000, 20.0),
    "larger model, whole tiles": (Machine(200_000.0, 3000.0, 1.0, jitter=0.05, tile_tokens=16), 1, 4000, 60.0),
}


def gaps_beside(
    sim: Simulation, streams: int, prompt: int, arrives: float, most_s: float
) -> tuple[list[float], list[float], float]:
    """Gaps of running streams before a long prompt arrives and until its first token, and when that comes; s."""
    for i in range(streams):
        sim.submit(0.0, f"s{i}", 20, 7000)
    sim.submit(arrives, "long", prompt, 4)
    while not (sim.records.get("long") and sim.records["long"].tokens):
        assert sim.now < arrives + most_s, "the long prompt must advance"
        sim.run(sim.now + 1.0)
    until = sim.records["long"].tokens[0]
    alone: list[float] = []
    beside: list[float] = []
    for i in range(streams):
        tokens = sim.records[f"s{i}"].tokens
        assert tokens[-1] > until - 1.0, "the stream must run on"
        for a, b in pairwise(tokens):
            if arrives / 2 < a and b <= arrives:
                alone.append(b - a)
            elif arrives <= a < until:
                beside.append(b - a)
    return alone, beside, until


@pytest.mark.parametrize("name", LONG_PROMPTS)
def test_gaps_beside_a_long_prompt_keep_their_bound_however_deep_it_is(name: str) -> None:
    """The bound of `python -m tools.bench.http --only long`, to whose streams tokens of short steps come together."""
    machine, streams, prompt, most_s = LONG_PROMPTS[name]
    sim = Simulation(Settings("m", 32), machine, pages=100_000, context=40_000)
    arrives = 0.5 + 60 * machine.fixed_us * 1e-6
    alone, beside, _ = gaps_beside(sim, streams, prompt, arrives, most_s)
    usual = max(PacingPolicy().wake_s, percentile(alone, 0.99))
    assert percentile(beside, 0.99) <= 3 * usual


@pytest.mark.parametrize(("prompt", "most_s"), [(16_000, 300.0), (32_000, 900.0)])
def test_a_prompt_advances_where_chunks_read_what_is_before_them(prompt: int, most_s: float) -> None:
    """The cost model leaves that out: smaller chunks must not make it ask for smaller ones still."""
    machine = Machine(52_000.0, 3000.0, 0.45, jitter=0.1, reread_us=2.0)
    sim = Simulation(Settings("m", 32), machine, pages=100_000, context=60_000)
    gaps_beside(sim, 1, prompt, 3.0, most_s)


def test_gaps_keep_their_bound_after_a_few_steps_when_the_machine_becomes_slower() -> None:
    machine = Machine()
    sim = Simulation(Settings("m", 32), machine, pages=100_000, context=40_000)
    sim.at(2.0, lambda: setattr(machine, "slowdown", 2.0))
    _, beside, _ = gaps_beside(sim, 1, 6000, 0.5, 60.0)
    bound = 3 * PacingPolicy().wake_s
    assert sum(gap > bound for gap in beside) <= 12
    assert percentile(beside, 0.5) > 0.4 * bound, "the prompt uses the time that it has"


def test_a_short_prompt_overtakes_a_long_one_of_the_same_tenant():
    sim = Simulation(Settings("m", 16), Machine())
    sim.submit(0.0, "long", 4000, 4)
    sim.submit(0.05, "short", 50, 4)
    sim.run()
    assert sim.records["short"].first_s < 0.2 < sim.records["long"].first_s


def test_long_prompts_do_not_starve_behind_short_ones():
    sim = Simulation(Settings("m", 8), Machine())
    for i in range(400):
        sim.submit(0.02 * i, f"s{i}", 100, 2)
    sim.submit(0.5, "long", 2000, 2)
    sim.run()
    # Alone it takes half a second; only prompts that arrive within that time may overtake it.
    assert sim.records["long"].first_s < 4.0


# ------------------------------------------------------------------ queues


def test_priority_is_a_bounded_head_start():
    queues = TenantQueues(1000, 0, lambda name: 1.0)
    low = sequence(queues, "low", "t", 0.0, 0)
    queues.push(low)
    for i in range(1, 100):
        queues.push(sequence(queues, f"high{i}", "t", float(i), i, priority=2))
    order = [queues.pop(low.tenant).id for _ in range(100)]
    # Only sequences that arrived within the head start overtake it.
    assert order.index("low") == math.floor(head_start_s(2)) > HEAD_START_S


@pytest.mark.parametrize("time_s", [math.inf, 300.0, 30.0, 0.5])
def test_the_head_start_is_less_than_a_request_can_wait(time_s: float) -> None:
    """A flood of the highest priority must not keep the lowest one waiting until its deadline."""
    heads = [head_start_s(priority, time_s) for priority in range(-1000, 1001)]
    assert all(one < other for one, other in pairwise(heads))
    assert heads[1000] == 0.0
    assert heads[-1] - heads[0] <= min(2 * MAX_HEAD_START_S, time_s / 3)
    if time_s >= 300:
        assert heads[1001] == -heads[999] == HEAD_START_S


def test_a_flood_of_the_highest_priority_overtakes_the_lowest_for_a_part_of_its_time() -> None:
    queues = TenantQueues(1000, 0, lambda name: 1.0)

    def push(name: str, now: float, priority: int) -> SequenceState:
        frame = submission(name, [1, 2], 5, priority=priority, deadline_ms=30_000)
        made = SequenceState(frame, b"g", queues.tenant("t"), now, queues.depth)
        queues.push(made)
        return made

    low = push("low", 0.0, -100)
    for i in range(100):
        push(f"high{i}", float(i), 100)
    assert [queues.pop(low.tenant).id for _ in range(100)].index("low") <= 10


def test_idle_time_saves_one_quantum_at_most():
    queues = TenantQueues(1000, 0, lambda name: 1.0)
    busy = queues.tenant("busy")
    queues.push(sequence(queues, "a", "busy"))
    busy.served = 1e6
    assert queues.tenant("new").served == 1e6 - QUANTUM
    # A tenant that computes with nothing waiting does not save more either.
    beside = queues.tenant("beside")
    beside.scheduled, beside.served = 1, 0.0
    queues.settle([])
    assert beside.served == 1e6 - QUANTUM
    assert busy.served == 1e6


def test_bounds_of_the_queue_and_of_a_tenant():
    queues = TenantQueues(4, 3, lambda name: 1.0)
    a, b = queues.tenant("a"), queues.tenant("b")
    for i in range(3):
        assert queues.make_room(a) is None
        queues.push(sequence(queues, f"a{i}", "a", order=i))
    with pytest.raises(QueueFullError, match=r"at most 3 \(rate_limits.max_queue_depth\)"):
        queues.make_room(a)
    queues.push(sequence(queues, "b0", "b", order=9))
    out = queues.make_room(b)
    assert out is not None
    assert out.id == "a2", "the newest sequence of the longest queue is removed for a tenant with less than its part"
    queues.remove(out)
    queues.push(sequence(queues, "b1", "b", order=10))
    with pytest.raises(QueueFullError, match=r"4 sequences wait, at most 4 \(scheduler.max_queue_depth\)"):
        queues.make_room(b)
    out = queues.make_room(queues.tenant("c"))
    assert out is not None
    assert out.id == "b1", "or for one with none"


@given(st.integers(2, 24), st.integers(0, 24), st.sampled_from([0.5, 1.0, 3.0]))
def test_a_full_queue_is_divided_by_weight(depth: int, n_quiet: int, weight: float) -> None:
    """Several sequences of a tenant get places that another one has taken, up to its part of the queue."""
    queues, order = TenantQueues(depth, 0, lambda name: weight if name == "quiet" else 1.0), itertools.count()
    quiet, busy = queues.tenant("quiet"), queues.tenant("busy")

    def fill(name: str, tenant: Tenant, n: int) -> int:
        """Add `n` sequences; the number of refused ones."""
        n_refused = 0
        for i in range(n):
            try:
                removed = queues.make_room(tenant)
            except QueueFullError:
                n_refused += 1
                continue
            if removed is not None:
                assert removed.tenant is not tenant
                queues.remove(removed)
            queues.push(sequence(queues, f"{name}{i}", tenant.name, order=next(order)))
        return n_refused

    assert fill("busy", busy, depth) == 0
    n_refused = fill("quiet", quiet, n_quiet)
    assert queues.depth == depth and quiet.waiting + n_refused == n_quiet
    if n_refused:  # one more would be more than its part, and less for the other one
        assert quiet.waiting and (quiet.waiting + 1) / weight > busy.waiting - 1
    if quiet.waiting > 1:
        assert quiet.waiting / weight <= busy.waiting
    n_quiet = quiet.waiting
    fill("late", busy, 2 * depth)  # what was given is not taken back, but for the tenant's own part
    assert quiet.waiting in {n_quiet, n_quiet - 1}


# ------------------------------------------------------------------ traffic


def test_every_request_ends_under_overload():
    sim = Simulation(Settings("m", 8, max_queue_depth=20), FAST)
    poisson(sim, 60.0, 5.0, 100, 40, seed=3)
    sim.run()
    figures = report(sim)
    assert figures["finished"] + figures["rejected"] == figures["requests"]
    assert figures["rejected"] > 0
    waits = [r.retry_after_s for r in sim.records.values() if r.finish == "rejected"]
    assert all(1 <= wait < 30 for wait in waits)


def test_with_few_pages_all_requests_finish():
    sim = Simulation(Settings("m", 16), FAST, pages=40)
    closed_loop(sim, 16, 48, 100, 100)
    sim.run()
    figures = report(sim)
    assert figures["finished"] == 48
    assert figures["preemptions"] > 0


def test_the_same_traffic_gives_the_same_figures():
    def figures() -> dict[str, float]:
        sim = Simulation(Settings("m", 8), FAST, seed=5)
        poisson(sim, 20.0, 3.0, 80, 30, seed=5)
        sim.run()
        return report(sim)

    assert figures() == figures()


def test_the_command_prints_a_table_and_one_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simulate", "--clients", "4", "--requests", "8", "--output", "5"])
    main()
    *table, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert figures["finished"] == 8
    assert len(table) == len(figures)
