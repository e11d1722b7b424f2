"""The first seconds of a scheduler: a flood that nothing was measured before, on simulated machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from stages.scheduler.core.settings import Settings
from tools.simulate import Machine, Simulation

MACHINES = {
    "tiny model": Machine(fixed_us=60.0, token_us=3.0, position_us=0.002),
    "small model": Machine(),
    "large model": Machine(fixed_us=60_000.0, token_us=4000.0, position_us=2.0),
}
BATCH = 16


def step_s(machine: Machine) -> float:
    """Time of a step with a full batch, without attention."""
    return (machine.fixed_us + BATCH * machine.token_us + machine.scheduler_us) * 1e-6


def flood(machine: Machine, sequences: int, output: int, deadline_ms: int) -> Counter[str]:
    """Finish reasons of sequences that arrive within 10 ms at a new scheduler."""
    settings = Settings("m", BATCH, max_queue_depth=10_000)
    sim = Simulation(settings, machine, pages=100_000)
    for i in range(sequences):
        sim.submit(0.01 * i / sequences, f"s{i}", 20, output, deadline_ms=deadline_ms)
    sim.run()
    return Counter(record.finish for record in sim.records.values())


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("output", [50, 300])
@pytest.mark.parametrize("first_s", [0.0, 2.0])
def test_a_sudden_flood_is_refused_in_time(name: str, output: int, first_s: float) -> None:
    """Sequences that cannot be computed in time are refused while they wait; few run into their deadline."""
    machine = replace(MACHINES[name], first_us=first_s * 1e6)
    batches = 4  # that can be computed in time
    run_s = output * step_s(machine)
    ends = flood(machine, 10 * batches * BATCH, output, round(1000 * (batches * run_s + 1.5 * first_s)) + 1500)
    assert ends["length"] >= 0.6 * batches * BATCH
    assert ends["rejected"] >= 0.5 * ends.total() or not ends["timeout"]
    assert ends["timeout"] <= BATCH


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("first_s", [0.0, 2.0])
def test_nothing_is_refused_that_can_be_computed_in_time(name: str, first_s: float) -> None:
    machine = replace(MACHINES[name], first_us=first_s * 1e6)
    batches = 4
    run_s = batches * 300 * step_s(machine)
    ends = flood(machine, batches * BATCH, 300, round(1000 * (3 * run_s + 2 * first_s)) + 1000)
    assert ends == {"length": batches * BATCH}
