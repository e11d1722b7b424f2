"""Kills at a certain phase of a request: a fault plan names the phase and the processes, and records what it did."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.faults import points
from pipeline.faults.plan import Strike, install, read_armed, read_strike
from shm.arena import process_ticks
from tests.e2e.server import Server, poll_until

# In the order in which a request passes them: fault points, with the number of the event.
PHASES = {
    "received": "gateway@received=1",  # before admission
    "admitted": "gateway@admitted=1",  # before the journal record
    "journaled": "gateway@journaled=1",
    "queued": "scheduler@queued=1",
    "prefill": "scheduler@prefill=1",  # the first chunk
    "prefill-2": "scheduler@prefill=2",
    "decode-3": "scheduler@decode=3",  # the first two are published while the last chunk is computed
    "decode-20": "scheduler@decode=20",
    "finishing": "scheduler@finishing=1",  # a last token, not sent
    "answered": "gateway@finishing=1",  # before the journal has the end
}
ARMED_S = 120.0


def plan_strike(
    server: Server, phase: str, pids: Iterable[int], observers: Iterable[int], action: str = "kill"
) -> None:
    """Install the fault, and wait until the processes that can be at the point follow the plan."""
    place, point = PHASES[phase].split("@")
    targets = "+".join(f"{pid}.{process_ticks(pid)}" for pid in pids)
    run_dir = server.home / "run"
    install(run_dir / points.FILE, f"{place}:{action}({targets})@{point}")
    wanted = set(observers)
    poll_until(lambda: wanted <= read_armed(run_dir), lambda: f"not all of {wanted} follow the plan", ARMED_S)


def struck(server: Server, phase: str) -> Strike:
    """The record of the fault that was planned. Fails if it did not happen."""
    strike = read_strike(server.home / "run")
    assert strike is not None, f"the request never was in the phase {phase}"
    assert f"{strike.point}={strike.number}" == PHASES[phase]
    return strike
