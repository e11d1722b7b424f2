"""Routing with shared prefixes and skewed popularity: the score beside policies that do not see what is cached where.

Each policy has an orchestrator of its own (`fleet.orchestrator.routing`) before the same agents, so that all requests
take the same way.  Requests belong to groups that share a long prefix; some groups are more popular than others (Zipf).
One agent's cache holds some of the groups, all agents' together hold all.  In each round every policy gets the same
sequence of groups, in texts of its own, so that none finds what another one has cached; the order of the policies
changes from round to round.

The checks of the instrument have known answers (`known_misses`), and no hit rate can exceed `repeats`, the share of
requests whose group came before.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

from starling.bench.load import drive
from starling.bench.response import ClientRequest, Response
from tools.bench.fleet.fleet_under_test import FleetUnderTest
from tools.bench.fleet.overhead import body, percentile
from tools.bench.offline.plots import BASELINE, BOUND, CANDIDATE, new_figure, save

POLICIES = ("score", "least-queue", "round-robin", "random")
GROUPS = 24
CLIENTS = 4  # each sends its next request when it has the answer
TOKENS = 8
PREFIX_WORDS = 160
KV_CACHE_MB = 32  # of an engine: the prefixes of some 7 groups
KNOWN_REQUESTS = 10  # of each check
_WORDS = ("lighthouse", "keeper", "stairs", "harbour", "lantern", "winter", "gull", "anchor", "rope", "ladder", "storm")

Address = tuple[str, int]


def prompt(of: str, group: int, number: int) -> str:
    """A prompt whose prefix is its group's. `of`: whose texts they are."""
    draw = random.Random(f"{of} {group}")
    words = " ".join(draw.choice(_WORDS) for _ in range(PREFIX_WORDS))
    return f"{of}: {words}. Question {number}:"


def sequence(n_requests: int, seed: int) -> list[int]:
    """The groups of the requests, in order."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(GROUPS)]
    return draw.choices(range(GROUPS), weights, k=n_requests)


def run(address: Address, of: str, groups: list[int], n_clients: int = CLIENTS) -> list[Response]:
    """All requests. Raises `RuntimeError` unless all are answered."""
    requests = [ClientRequest(body(prompt(of, group, number), TOKENS)) for number, group in enumerate(groups)]
    clients = [requests[first::n_clients] for first in range(n_clients)]
    responses = drive(address, [one for one in clients if one]).responses
    for response in responses:
        response.parse()
        if not response.is_good:
            raise RuntimeError(response.error or str(response.status))
    return responses


def is_hit(response: Response) -> bool:
    """Whether the prefix was cached."""
    return response.cached_tokens > response.prompt_tokens // 2


def known_misses(fleet: FleetUnderTest, orchestrators: dict[str, Address]) -> dict[str, dict[str, int]]:
    """Requests of one group, one at a time, that find no cached prefix.

    With all agents: one of the score's, one per agent in turn (the least queue is the one chosen longest ago, when all
    are empty).  With one agent: one of each policy's.
    """
    found: dict[str, dict[str, int]] = {}
    groups = [0] * KNOWN_REQUESTS
    agents = [agent["agent_id"] for agent in fleet.state()["agents"]]
    for name, address in orchestrators.items():
        responses = run(address, f"one prefix {name}", groups, 1)
        found[name] = {"all agents": sum(not is_hit(response) for response in responses)}
    for agent in agents[1:]:
        fleet.cordon(agent)
    for name, address in orchestrators.items():
        fleet.wait_cordoned(address, len(agents) - 1)
        responses = run(address, f"one agent {name}", groups, 1)
        found[name]["one agent"] = sum(not is_hit(response) for response in responses)
    for agent in agents[1:]:
        fleet.uncordon(agent)
    for address in orchestrators.values():
        fleet.wait_cordoned(address, 0)
    expected = {"score": 1, "least-queue": len(agents), "round-robin": len(agents)}
    for name, misses in expected.items():
        if found[name] != {"all agents": misses, "one agent": 1}:
            raise RuntimeError(f"the instrument is wrong: {name} has {found[name]} misses, not {misses} and 1")
    return found


def estimates(report: dict[str, Any]) -> dict[str, float]:
    """How far the estimate was from what happened, per request, ms; both are until the first byte of the answer."""
    count = max(1, report["count"])
    means = {name: round(1000 * report[f"{name}_s"] / count, 1) for name in ("predicted", "actual", "error")}
    return {"requests": report["count"], **{f"{name}_ms": value for name, value in means.items()}}


def figures(responses: list[Response]) -> dict[str, Any]:
    """Of some requests."""
    first = [1000 * response.first_s for response in responses]
    prompts = sum(response.prompt_tokens for response in responses)
    return {
        "first_token_ms": {"p50": round(statistics.median(first), 1), "p99": round(percentile(first, 0.99), 1)},
        "hit_rate": round(sum(response.cached_tokens for response in responses) / prompts, 3),
        "hits": round(sum(map(is_hit, responses)) / len(responses), 3),
        "prompt_tokens": round(prompts / len(responses)),
    }


def measure(n_requests: int, n_agents: int, rounds: int, seed: int = 5) -> dict[str, Any]:
    """Figures by policy, of all rounds and of each. `n_requests`: of a policy in a round."""
    responses: dict[str, list[list[Response]]] = {name: [] for name in POLICIES}
    repeats = []
    with FleetUnderTest(n_agents, kv_cache_mb=KV_CACHE_MB) as fleet:
        orchestrators = {"score": fleet.address}
        orchestrators |= {name: fleet.add_orchestrator(routing=name) for name in POLICIES[1:]}
        known = known_misses(fleet, orchestrators)
        print("misses with known answers:", known, flush=True)
        before = {name: fleet.state(address)["estimates"] for name, address in orchestrators.items()}
        for number in range(rounds):
            groups = sequence(n_requests, seed + number)
            repeats.append(1 - len(set(groups)) / n_requests)
            for turn in range(len(POLICIES)):
                name = POLICIES[(turn + number) % len(POLICIES)]
                responses[name].append(run(orchestrators[name], f"{name} {seed + number}", groups))
                print(number, name, figures(responses[name][-1]), flush=True)
        after = {name: fleet.state(address)["estimates"] for name, address in orchestrators.items()}
    policies = {
        name: {
            **figures([response for one in done for response in one]),
            "estimates": estimates({key: after[name][key] - before[name][key] for key in after[name]}),
            "rounds": [figures(one) for one in done],
        }
        for name, done in responses.items()
    }
    return {
        "agents": n_agents,
        "requests": n_requests * rounds,
        "groups": GROUPS,
        "repeats": round(statistics.mean(repeats), 3),
        "known_misses": known,
        "policies": policies,
    }


def write_plot(found: dict[str, Any], path: Path, title: str, description: str = "") -> None:
    """Time to the first token and hit rate by policy, as SVG. `title`: on what they were measured, and when."""
    names = list(found["policies"])
    figure = new_figure(7, 3.4)
    figure.suptitle(title, fontsize=10)
    times, hits = figure.subplots(1, 2)
    for offset, share, colour in ((-0.2, "p50", CANDIDATE), (0.2, "p99", BASELINE)):
        values = [found["policies"][name]["first_token_ms"][share] for name in names]
        times.bar([at + offset for at in range(len(names))], values, 0.4, label=share, color=colour)
    times.set_title("time to the first token, ms", fontsize=9)
    times.margins(y=0.25)  # the legend is above the bars
    times.legend(frameon=False, loc="upper left", ncols=2)
    hits.bar(names, [found["policies"][name]["hit_rate"] for name in names], 0.6, color=CANDIDATE)
    hits.axhline(found["repeats"], color=BOUND, linestyle="--", linewidth=1, label="most that can be cached")
    hits.set_title("prompt tokens from the cache, share", fontsize=9)
    hits.set(ylim=(0, 1))
    hits.legend(frameon=False, loc="upper right")
    times.set_xticks(range(len(names)), names)
    for axes in (times, hits):
        axes.tick_params(axis="x", labelrotation=20)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, description)
