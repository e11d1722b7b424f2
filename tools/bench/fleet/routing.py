"""Routing with shared prefixes: the score beside policies that do not see what agents have cached.

Requests belong to groups that share a long prefix; some groups are more popular than others (Zipf).  Each policy gets
texts of its own, so that none finds what another one has cached, and the same sequence of groups.  The score routes in
the orchestrator; the others are made here, and ask the engines directly: they are spared the orchestrator's time.  The
check of the instrument is the share of requests whose group came before: no hit rate can be higher.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starling.bench.load import drive
from starling.bench.response import ClientRequest, Response
from tools.bench.fleet.fleet_under_test import Engine, FleetUnderTest
from tools.bench.fleet.overhead import body, percentile

POLICIES = ("score", "round-robin", "least-queue", "random")
GROUPS = 12
AT_ONCE = 4
TOKENS = 8
PREFIX_WORDS = 260
_WORDS = ("lighthouse", "keeper", "stairs", "harbour", "lantern", "winter", "gull", "anchor", "rope", "ladder", "storm")


def prompt(policy: str, group: int, number: int) -> str:
    """A prompt whose prefix is its group's."""
    draw = random.Random(f"{policy} {group}")
    words = " ".join(draw.choice(_WORDS) for _ in range(PREFIX_WORDS))
    return f"{words}. Question {number}:"


def sequence(n_requests: int) -> list[int]:
    """The groups of the requests, in order."""
    draw = random.Random(5)
    weights = [1 / (rank + 1) for rank in range(GROUPS)]
    return draw.choices(range(GROUPS), weights, k=n_requests)


class Policy:
    """Where each request goes."""

    def __init__(self, name: str, fleet: FleetUnderTest, engines: list[Engine]) -> None:
        self.name = name
        self._fleet = fleet
        self._engines = engines
        self._turn = 0
        self._draw = random.Random(1)
        self._queues: Counter[int] = Counter()

    def choose(self) -> tuple[tuple[str, int], str]:
        """Address and key."""
        if self.name == "score":
            return self._fleet.address, ""
        if self.name == "round-robin":
            self._turn += 1
            at = self._turn % len(self._engines)
        elif self.name == "random":
            at = self._draw.randrange(len(self._engines))
        else:
            at = min(range(len(self._engines)), key=lambda one: self._queues[one])
        self._queues[at] += 1
        return self._engines[at].address, self._engines[at].key

    def batch_ended(self) -> None:
        """All requests have their answers."""
        self._queues.clear()


def run(policy: Policy, groups: list[int]) -> list[Response]:
    """All requests, `AT_ONCE` at a time."""
    responses: list[Response] = []
    for begin in range(0, len(groups), AT_ONCE):
        by_target: dict[tuple[tuple[str, int], str], list[list[ClientRequest]]] = {}
        for number, group in enumerate(groups[begin : begin + AT_ONCE], begin):
            address, key = policy.choose()
            request = ClientRequest(body(prompt(policy.name, group, number), TOKENS), key)
            by_target.setdefault((address, key), []).append([request])
        responses += drive_all(by_target)
        policy.batch_ended()
    return responses


def drive_all(by_target: dict[tuple[tuple[str, int], str], list[list[ClientRequest]]]) -> list[Response]:
    """Send to several servers at once: a thread for each."""
    with ThreadPoolExecutor(len(by_target)) as threads:
        runs = [threads.submit(drive, address, clients) for (address, _), clients in by_target.items()]
        responses = [response for one in runs for response in one.result().responses]
    for response in responses:
        response.parse()
        if not response.is_good:
            raise RuntimeError(response.error or str(response.status))
    return responses


def estimates(report: dict[str, Any]) -> dict[str, float]:
    """How far the score was from what happened, per request, ms; both are until the first byte of the answer."""
    count = max(1, report["count"])
    means = {name: round(1000 * report[f"{name}_s"] / count, 1) for name in ("predicted", "actual", "error")}
    return {"requests": report["count"], **{f"{name}_ms": value for name, value in means.items()}}


def measure(n_requests: int, n_agents: int) -> dict[str, Any]:
    """Figures by policy."""
    found: dict[str, Any] = {}
    groups = sequence(n_requests)
    with FleetUnderTest(n_agents) as fleet:
        engines = fleet.engines()
        for name in POLICIES:
            responses = run(Policy(name, fleet, engines), groups)
            first = [1000 * response.first_s for response in responses]
            prompts = sum(response.prompt_tokens for response in responses)
            found[name] = {
                "first_token_ms": {"p50": round(statistics.median(first), 1), "p99": round(percentile(first, 0.99), 1)},
                "hit_rate": round(sum(response.cached_tokens for response in responses) / prompts, 3),
                "prompt_tokens": round(prompts / len(responses)),
            }
            if name == "score":
                found[name]["estimates"] = estimates(fleet.state()["estimates"])
            print(name, found[name], flush=True)
    repeats = round(1 - len(set(groups)) / n_requests, 3)
    return {"agents": n_agents, "requests": n_requests, "groups": GROUPS, "repeats": repeats, "policies": found}
