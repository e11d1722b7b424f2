"""The warm path: time to the first token through the orchestrator, beside the agent's engine asked directly.

Requests go to both in turn, so that what else the machine does meets both alike.  The check of the instrument is a
second run of the engine itself: its difference to the first one should be nothing.  The orchestrator's CPU time counts
for itself: other work on the cores does not change it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from pipeline import procfs
from pipeline.config.schema import DEMO_MODEL
from starling.bench.load import Run, drive
from starling.bench.response import ClientRequest
from tools.bench.fleet.fleet_under_test import FleetUnderTest

TOKENS = 16
STREAMS = (1, 16)
_numbers = itertools.count()


def body(prompt: str, n_tokens: int) -> dict[str, Any]:
    """A greedy stream."""
    return {
        "model": DEMO_MODEL,
        "prompt": prompt,
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of the others is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(rounds: int) -> dict[str, Any]:
    """Figures by the number of streams, in ms."""
    found: dict[str, Any] = {}
    with FleetUnderTest(1) as fleet:
        (engine,) = fleet.engines()
        (orchestrator,) = fleet.processes("-m starling orchestrator")

        def run(address: tuple[str, int], key: str, n_streams: int) -> Run:
            prompts = [f"Request {next(_numbers)}. The keeper climbed" for _ in range(n_streams)]
            return drive(address, [[ClientRequest(body(prompt, TOKENS), key)] for prompt in prompts])

        sides: dict[str, Callable[[int], Run]] = {
            "engine": lambda n: run(engine.address, engine.key, n),
            "orchestrator": lambda n: run(fleet.address, "", n),
            "engine again": lambda n: run(engine.address, engine.key, n),
        }
        for n_streams in STREAMS:
            first: dict[str, list[float]] = {side: [] for side in sides}
            cpu_s, n_requests = 0.0, 0
            for number in range(-3, rounds):
                for side, ask in sides.items():
                    before = procfs.cpu_s(orchestrator)
                    responses = ask(n_streams).responses
                    for response in responses:
                        response.parse()
                        if not response.is_good:
                            raise RuntimeError(f"{side}: {response.error or response.status}")
                    if number >= 0:
                        first[side] += [1000 * response.first_s for response in responses]
                        if side == "orchestrator":
                            cpu_s += procfs.cpu_s(orchestrator) - before
                            n_requests += n_streams
            found[str(n_streams)] = {
                "first_token_ms": {
                    side: {"p50": round(statistics.median(values), 2), "p99": round(percentile(values, 0.99), 2)}
                    for side, values in first.items()
                },
                "added_p50_ms": round(statistics.median(first["orchestrator"]) - statistics.median(first["engine"]), 2),
                "check_p50_ms": round(statistics.median(first["engine again"]) - statistics.median(first["engine"]), 2),
                "cpu_ms_per_request": round(1000 * cpu_s / n_requests, 2),
                "tokens_per_request": TOKENS,
                "requests": n_requests,
            }
    return found
