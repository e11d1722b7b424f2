"""`python -m tools.bench.simulated`: traffic on a real server, compared with what tools/simulate.py predicts.

The simulated machine is calibrated first, with other traffic on the same server: the cost of a step by tokens and
attention positions (least squares of relative errors), the pause between two steps, and what HTTP, tokenizer and kv
add to a first token.  Then each kind of traffic is simulated and sent.  The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, ModelConfig
from stages.scheduler.core.settings import Settings
from stages.worker.checkpoint.prepare import prepare
from starling.bench.figures import percentile
from starling.bench.load import Run, drive
from starling.bench.response import ClientRequest
from tools.bench.disturbance import Watch
from tools.bench.http.command import describe
from tools.bench.http.server_under_test import ServerUnderTest
from tools.bench.http.step_watch import StepWatch
from tools.bench.http.workload import Prompts, body
from tools.bench.offline.results import machine
from tools.simulate import Machine, Simulation, arrivals, closed_loop, poisson, report

BATCH = 16
CLOSED = ((1, 6, 200, 48), (8, 4, 200, 48), (16, 3, 60, 96), (48, 2, 150, 48))  # clients, each, prompt, output
OPEN = ((4.0, 15.0, 120, 60), (9.0, 15.0, 120, 60))  # rate, seconds, prompt, output
CALIBRATION = ((1, 1, 100, 64), (4, 1, 400, 32), (16, 1, 100, 64), (2, 1, 1000, 24), (11, 1, 30, 32))
NAMES = ("output_tokens_per_s", "first_token_p50_ms", "first_token_p95_ms", "gap_p50_ms")


def fit(steps: list[tuple[int, int, float]]) -> Machine:
    """Cost of steps (tokens, positions, us) by least squares of relative errors; outliers are left out once."""
    data = np.array(steps, np.float64)
    if len(data) < 16:
        raise ValueError(f"{len(data)} steps are too few to learn from, at least 16")
    found: np.ndarray = np.zeros(3)
    for _ in range(2):
        features = np.stack([np.ones(len(data)), data[:, 0], data[:, 1]], axis=1)
        found = np.linalg.lstsq(features / data[:, 2:], np.ones(len(data)), rcond=None)[0]
        error = np.abs(features @ found / data[:, 2] - 1)
        data = data[error <= max(0.1, 3 * float(np.median(error)))]
    fixed, token, position = (float(max(v, low)) for v, low in zip(found, (10.0, 1.0, 1e-4), strict=True))
    return Machine(fixed_us=round(fixed, 1), token_us=round(token, 2), position_us=round(position, 5))


class Comparison:
    """One server and the simulated machine calibrated on it; runs each kind of traffic on both."""

    def __init__(self, server: ServerUnderTest, prompts: Prompts) -> None:
        self._server, self._prompts = server, prompts
        self.outside_ms = 0.0  # part of a first token's time that is HTTP, tokenizer and kv
        watch = StepWatch(server)
        try:
            look = watch.look_sometimes
            runs = [drive(server.address, self._requests(*traffic), meanwhile=look) for traffic in CALIBRATION]
            watch.look()
        finally:
            watch.close()
        pause_us = percentile([us for _, us in watch.pauses], 0.5)
        self.machine = fit(watch.steps)
        self.machine.fixed_us += round(pause_us, 1)  # a step's cost includes the pause before it
        self.machine.jitter = 0.05
        alone = self._simulate(lambda sim: closed_loop(sim, *_closed(CALIBRATION[0])))
        self.outside_ms = max(0.0, 1e3 * runs[0].responses[0].first_s - alone["first_token_p50_ms"])

    def _requests(self, clients: int, each: int, prompt: int, output: int) -> list[list[ClientRequest]]:
        return [[self._request(prompt, output) for _ in range(each)] for _ in range(clients)]

    def _request(self, prompt: int, output: int) -> ClientRequest:
        return self._server.request(body(self._server.model, self._prompts.text(prompt), output))

    def _simulate(self, traffic: Callable[[Simulation], None]) -> dict[str, float]:
        sim = Simulation(Settings("m", BATCH), self.machine, pages=100_000)
        traffic(sim)
        sim.run()
        found = report(sim)
        for name in ("first_token_p50_ms", "first_token_p95_ms"):
            found[name] = round(found[name] + self.outside_ms, 1)
        return found

    def closed(self, clients: int, each: int, prompt: int, output: int) -> dict[str, Any]:
        """Closed loop: each client sends its next request when it has its response."""
        predicted = self._simulate(lambda sim: closed_loop(sim, *_closed((clients, each, prompt, output))))
        run = drive(self._server.address, self._requests(clients, each, prompt, output))
        return _row(f"{clients} clients, {prompt} in, {output} out", predicted, run)

    def open(self, rate: float, seconds: float, prompt: int, output: int) -> dict[str, Any]:
        """Open loop: arrivals do not depend on responses."""
        predicted = self._simulate(lambda sim: poisson(sim, rate, seconds, prompt, output, 1))
        plan = list(arrivals(rate, seconds, prompt, output, 1))
        requests = [[self._request(n_in, n_out)] for _, n_in, n_out in plan]
        run = drive(self._server.address, requests, starts=[when for when, _, _ in plan])
        return _row(f"{rate:g} arrivals/s, {prompt} in, {output} out", predicted, run)


def _closed(traffic: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Arguments of `closed_loop`: it counts requests of all clients together."""
    clients, each, prompt, output = traffic
    return clients, clients * each, prompt, output


def _row(title: str, predicted: dict[str, float], run: Run) -> dict[str, Any]:
    good = [response for response in run.responses if response.is_good]
    firsts = [1e3 * response.first_s for response in good]
    measured = {
        "output_tokens_per_s": round(sum(a.tokens for a in good) / (max(a.times[-1] for a in good) - run.began), 1),
        "first_token_p50_ms": round(percentile(firsts, 0.5), 1),
        "first_token_p95_ms": round(percentile(firsts, 0.95), 1),
        "gap_p50_ms": round(percentile([1e3 * gap for a in good for gap in a.gaps_s], 0.5), 2),
    }
    return {
        "traffic": title,
        "requests": len(run.responses),
        "failed": len(run.responses) - len(good),
        "predicted": {name: predicted[name] for name in NAMES},
        "measured": measured,
        "ratio": {name: round(measured[name] / max(1e-9, predicted[name]), 2) for name in NAMES},
    }


@click.command()
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="A model file; default: the demo model.")
@click.option("--quick", is_flag=True, help="Two kinds of traffic only.")
def main(gguf: Path | None, quick: bool) -> None:
    """What the simulator predicts, and what a server does."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    model = ModelConfig(name=gguf.stem, path=str(gguf)) if gguf else ModelConfig(name=DEMO_MODEL)
    index = prepare(model, paths.models_dir())
    prompts = Prompts(index, int.from_bytes(os.urandom(4)))
    settings = {"performance": {"batch_size": BATCH}}
    with ServerUnderTest(describe(model), cores, settings, {"a": "sk-bench-a"}) as server:
        drive(server.address, [[server.request(body(server.model, prompts.text(100)))]])
        watch = Watch(server.pids, cores)
        compared = Comparison(server, prompts)
        rows = [watch.undisturbed(partial(compared.closed, *each)) for each in (CLOSED[1:2] if quick else CLOSED)]
        rows += [watch.undisturbed(partial(compared.open, *each)) for each in (OPEN[:1] if quick else OPEN)]
    click.echo(f"{'traffic':36} {'tokens/s':>16} {'first p50 ms':>16} {'first p95 ms':>16} {'gap p50 ms':>14}")
    for row in rows:
        pairs = [f"{row['predicted'][name]:,.0f} / {row['measured'][name]:,.0f}" for name in NAMES[:3]]
        gap = f"{row['predicted']['gap_p50_ms']:.1f} / {row['measured']['gap_p50_ms']:.1f}"
        click.echo(f"{row['traffic']:36} {pairs[0]:>16} {pairs[1]:>16} {pairs[2]:>16} {gap:>14}")
    error = statistics.median(abs(row["ratio"]["output_tokens_per_s"] - 1) for row in rows)
    click.echo(
        json.dumps(
            {
                "machine": machine(cores),
                "simulated": vars(compared.machine),
                "outside_ms": round(compared.outside_ms, 1),
                "rows": rows,
                "median_error_of_throughput": round(error, 3),
                **watch.plain(),
            }
        )
    )


if __name__ == "__main__":
    main()
