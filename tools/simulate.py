"""Discrete-event simulation of one model: the scheduler's own code under traffic, with computed step times.

    python -m tools.simulate --clients 16 --prompt 100 --output 64
    python -m tools.simulate --rate 20 --seconds 60 --token-us 120 --pages 2000

`python -m tools.bench.simulated` runs the same traffic on a real server and compares.

The engine, its policies and its ring are the product's; the worker is the formula of policy/cost.py, kv a counter of
pages, and the clock a variable.  It predicts throughput and latency for traffic or hardware that is not available.
The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeline.protocol.messages import Acquire, Denied, Extend, Granted, KvReady, Release, Sampling, Submit
from shm import step_ring as sh
from shm.step_ring import blank_steps
from stages.scheduler.core.engine import Engine
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.settings import Settings
from stages.scheduler.policy.cost import CostModel

GATEWAY = b"simulation"
TOKEN = 1


@dataclass
class Machine:
    """Times of the simulated machine, in microseconds."""

    fixed_us: float = 3000.0
    token_us: float = 250.0
    position_us: float = 0.15
    scheduler_us: float = 150.0  # from a step's end to the publication of a step that needs its result
    kv_us: float = 100.0  # from a request to its answer
    jitter: float = 0.0  # relative standard deviation of a step's time
    first_us: float = 0.0  # additional time of the first step
    slowdown: float = 1.0  # factor of all steps; may be changed between them
    tile_tokens: int = 1  # tokens of a step cost as much as whole tiles of so many
    reread_us: float = 0.0  # of a chunk for each position before it: K and V are read once for all of its tokens


@dataclass
class Record:
    """Times of one sequence, in seconds."""

    tenant: str
    submitted: float
    tokens: list[float] = field(default_factory=list)  # arrival time of each
    finish: str = ""
    retry_after_s: float = 0.0

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.tokens[0] - self.submitted

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


class Simulation:
    """`submit` and `at` schedule events; `run` processes them in order of time."""

    def __init__(
        self,
        settings: Settings,
        machine: Machine,
        *,
        pages: int = 4096,
        page_tokens: int = 32,
        context: int = 8192,
        weights: dict[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.machine = machine
        self.records: dict[str, Record] = {}
        self.on_end: Callable[[str, Record], None] = lambda name, record: None
        self.step_s: list[float] = []
        self._truth = CostModel(machine.fixed_us, machine.token_us, machine.position_us)
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n = self._prompts = 0
        self._busy = False
        self._alarm = float("inf")  # time of the next scheduled wake-up
        self._page_tokens, self._free_pages, self._total = page_tokens, pages, pages
        self._leased: dict[str, int] = {}
        self.engine = Engine(settings, 0.0, lambda name: (weights or {}).get(name, 1.0))
        geometry = settings.steps_geometry(context, page_tokens, 0, 0)
        self._steps = blank_steps(geometry)
        ring = self.engine.worker.ring = Ring(self._steps, geometry, 1)
        ring.start(1)
        self.engine.attach(context, 1 << 30)
        self.engine.kv_ready(KvReady("m", "", "", pages, page_tokens, 1))
        self.at(0.1, self._tick)

    # -------------------------------------------------------------- events

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Call `what` at simulated time `when`."""
        self._n += 1
        heapq.heappush(self._events, (when, self._n, what))

    def submit(
        self,
        when: float,
        name: str,
        prompt: int,
        output: int,
        tenant: str = "t",
        priority: int = 0,
        deadline_ms: int = 0,
    ) -> None:
        """A sequence that generates `output` tokens from a prompt of `prompt` tokens that no other sequence shares."""
        self._prompts += 1
        tokens = array("i", [self._prompts] + [TOKEN] * (prompt - 1))
        frame = Submit(
            name,
            name,
            "m",
            tenant,
            tokens.tobytes(),
            output,
            Sampling(),
            priority=priority,
            deadline_ms=deadline_ms,
        )

        def arrive() -> None:
            self.records[name] = Record(tenant, self.now)
            self.engine.submissions.submit(GATEWAY, frame, self.now)
            self._run_round()

        self.at(when, arrive)

    def run(self, until: float = float("inf")) -> None:
        """Process events until none is left, or until simulated time `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def _tick(self) -> None:
        self.engine.tick(self.now)
        self.engine.pages.retry()
        self._run_round()
        if self._events or self.engine.is_busy:
            self.at(self.now + 0.1, self._tick)

    # -------------------------------------------------------------- scheduler, kv, worker

    def _run_round(self) -> None:
        self.engine.steps.run_round(self.now)
        self._handle_kv_frames()
        self._collect()
        if not self._busy:
            self._begin()
        delay = self.engine.steps.delay_s(self.now)
        if self.now + delay < self._alarm:
            self._alarm = self.now + delay
            self.at(self._alarm, self._wake)

    def _wake(self) -> None:
        self._alarm = float("inf")
        self._run_round()

    def _begin(self) -> None:
        """The worker begins the next step if there is one."""
        control = self._steps.control
        number = int(control[sh.DONE]) + 1
        if number > int(control[sh.HEAD]):
            self._busy = False
            return
        self._busy = True
        step = next(s for s in self.engine.steps.unacknowledged if s.number == number)
        tile = self.machine.tile_tokens
        before = sum(entry.start for entry in step.entries if entry.count > 1)
        took_us = self._truth.predict(-(-step.tokens // tile) * tile, step.positions) + self.machine.reread_us * before
        took = took_us * 1e-6 * self.machine.slowdown
        took *= max(0.5, self._rng.gauss(1.0, self.machine.jitter)) if self.machine.jitter else 1.0
        took += self.machine.first_us * 1e-6 if number == 1 else 0.0
        slot = number % sh.SLOTS
        for row, start, count, samples, base, *_ in self._steps.entries[slot, : len(step.entries)].tolist():
            self._steps.out_token[slot, base : base + samples] = TOKEN
            if samples == 1:
                self._steps.tokens[row, start + count] = TOKEN
        self._steps.timing[slot] = (0, 0, int(took * 1e9), 0)
        self.step_s.append(took)
        self.at(self.now + took, lambda: self._end(number))

    def _end(self, number: int) -> None:
        self._steps.control[sh.DONE] = number
        self._begin()  # a step that was published ahead begins at once; the scheduler is woken later
        self.at(self.now + self.machine.scheduler_us * 1e-6, self._run_round)

    def _handle_kv_frames(self) -> None:
        frames, self.engine.leases.frames = self.engine.leases.frames, []
        for frame in frames:
            if isinstance(frame, Release):
                self._free_pages += self._leased.pop(frame.sequence, 0)
            elif isinstance(frame, Acquire | Extend):
                self.at(self.now + self.machine.kv_us * 1e-6, lambda request=frame: self._answer(request))  # type: ignore[misc]

    def _answer(self, request: Acquire | Extend) -> None:
        want = -(-request.want_tokens // self._page_tokens)
        more = want - self._leased.get(request.sequence, 0)
        if more > self._free_pages:
            self.engine.pages.denied(Denied(request.id, request.sequence, True, more, self._free_pages, self._total))
        else:
            self._free_pages -= more
            self._leased[request.sequence] = want
            # Page numbers do not matter here; the table only has to pass the checks.
            self.engine.pages.granted(Granted(request.id, request.sequence, tuple(range(want))))
        self._run_round()

    def _collect(self) -> None:
        outbox = self.engine.outbox
        for sequences in outbox.tokens.values():
            for part in sequences:
                record = self.records[part.sequence]
                record.tokens.extend([self.now] * len(part.tokens))
                if part.finish:
                    self._finish(part.sequence, part.finish)
        outbox.tokens.clear()
        outbox.started.clear()
        rejected, outbox.rejected = outbox.rejected, []
        for _, frame in rejected:
            self.records[frame.sequence].retry_after_s = frame.retry_after_s
            self._finish(frame.sequence, "rejected")

    def _finish(self, name: str, finish: str) -> None:
        record = self.records[name]
        record.finish = finish
        self.on_end(name, record)


def closed_loop(sim: Simulation, clients: int, requests: int, prompt: int, output: int) -> None:
    """`clients` clients that each submit again as soon as they are answered; `requests` requests in all."""
    sent = clients

    def again(name: str, record: Record) -> None:
        nonlocal sent
        if sent < requests:
            sent += 1
            sim.submit(sim.now, f"r{sent}", prompt, output)

    sim.on_end = again
    for i in range(min(clients, requests)):
        sim.submit(0.0, f"r{i + 1}", prompt, output)


def poisson(sim: Simulation, rate: float, seconds: float, prompt: int, output: int, seed: int) -> None:
    """Submit requests as given by `arrivals`."""
    for i, (when, n_in, n_out) in enumerate(arrivals(rate, seconds, prompt, output, seed)):
        sim.submit(when, f"r{i + 1}", n_in, n_out)


def arrivals(rate: float, seconds: float, prompt: int, output: int, seed: int) -> Iterator[tuple[float, int, int]]:
    """(time in s, prompt length, output length): Poisson arrivals, `rate` a second, exponential lengths."""
    rng = random.Random(seed)
    now = 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        n_in, n_out = (max(1, min(3 * mean, int(rng.expovariate(1 / mean)))) for mean in (prompt, output))
        yield now, n_in, n_out


def percentile(values: list[float], part: float) -> float:
    """The nearest-rank percentile; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def report(sim: Simulation) -> dict[str, float]:
    """The figures of a run: times in milliseconds, throughput in output tokens a second."""
    done = [r for r in sim.records.values() if r.finish in ("stop", "length")]
    firsts = [1e3 * r.first_s for r in done if r.tokens]
    gaps = [1e3 * g for r in done for g in r.gaps_s]
    end = max((r.tokens[-1] for r in done if r.tokens), default=0.0)
    begin = min((r.submitted for r in done), default=0.0)
    stats = sim.engine.stats
    return {
        "requests": len(sim.records),
        "finished": len(done),
        "rejected": sum(r.finish == "rejected" for r in sim.records.values()),
        "output_tokens_per_s": round(sum(len(r.tokens) for r in done) / max(1e-9, end - begin), 1),
        "first_token_p50_ms": round(percentile(firsts, 0.5), 1),
        "first_token_p95_ms": round(percentile(firsts, 0.95), 1),
        "gap_p50_ms": round(percentile(gaps, 0.5), 2),
        "gap_p95_ms": round(percentile(gaps, 0.95), 2),
        "gap_p99_ms": round(percentile(gaps, 0.99), 2),
        "batch_mean": round(stats.batch.mean, 2),
        "step_mean_ms": round(1e3 * statistics.fmean(sim.step_s), 2) if sim.step_s else 0.0,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    traffic = parser.add_mutually_exclusive_group()
    traffic.add_argument("--clients", type=int, default=16, help="closed loop: each client waits for its answer")
    traffic.add_argument("--rate", type=float, default=0.0, help="open loop: Poisson arrivals a second")
    parser.add_argument("--requests", type=int, default=0, help="requests of a closed loop; default: 8 for each client")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of an open loop")
    parser.add_argument("--prompt", type=int, default=100, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--batch", type=int, default=32, help="max_batch_size")
    parser.add_argument("--step-tokens", type=int, default=512, help="max_step_tokens")
    parser.add_argument("--queue", type=int, default=1000, help="max_queue_depth")
    parser.add_argument("--pages", type=int, default=4096, help="pages of 32 tokens in the KV arena")
    parser.add_argument("--seed", type=int, default=0)
    for name, default in vars(Machine()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    a = parser.parse_args()
    machine = Machine(**{name: getattr(a, name) for name in vars(Machine())})
    settings = Settings("m", a.batch, max_queue_depth=a.queue, max_step_tokens=a.step_tokens)
    sim = Simulation(settings, machine, pages=a.pages, seed=a.seed)
    if a.rate:
        poisson(sim, a.rate, a.seconds, a.prompt, a.output, a.seed)
    else:
        closed_loop(sim, a.clients, a.requests or 8 * a.clients, a.prompt, a.output)
    sim.run()
    figures = report(sim)
    for name, value in figures.items():
        print(f"{name:22} {value:>12}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
