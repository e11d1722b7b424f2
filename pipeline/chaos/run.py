"""A scenario: faults at intervals under traffic, until the time is up or a byte is wrong.

    learn the undisturbed answers -> start traffic -> (fault, recovery) * -> finish traffic -> table

A pause is the longest silence of a stream between a fault and the recovery after it (readiness, and a
token on the streams again).
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.chaos import faults
from pipeline.chaos.traffic import Outcome, Traffic
from pipeline.config_schema import Config

RECOVERY_S = 60.0
SETTLE_S = 1.0  # between a recovery and the next fault, so that one is not measured as the other


@dataclass
class Event:
    """A fault that was done. Times are of the monotonic clock, s."""

    kind: str
    what: str
    at: float
    until: float = 0.0
    recovered: bool = True


@dataclass
class Row:
    """One line of the table."""

    fault: str
    faults: int = 0
    streams: int = 0
    identical: int = 0
    different: int = 0
    lost: int = 0
    pauses_ms: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        ordered = sorted(self.pauses_ms)

        def at(q: float) -> float | None:
            return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1) if ordered else None

        return {
            "fault": self.fault, "faults": self.faults, "streams": self.streams,
            "identical": self.identical, "different": self.different, "lost": self.lost,
            "pause_ms_p50": round(statistics.median(ordered), 1) if ordered else None,
            "pause_ms_p95": at(0.95),
            "pause_ms_max": at(1.0),
        }  # fmt: skip


Action = tuple[str, Callable[[], str]]  # (kind, do)


def targets(config: Config) -> list[str]:
    """Processes that must be expendable: everything but the gateway, whose death ends connections."""
    return sorted(name for name in faults.processes(config) if name != "gateway")


def actions(scenario: str, config: Config, chance: random.Random) -> list[Action]:
    """One round of the scenario, in order."""

    def kill(name: str, number: signal.Signals) -> Action:
        word = {signal.SIGKILL: "kill", signal.SIGSTOP: "stop", signal.SIGSEGV: "segv"}[number]
        rank = f"/{name.rsplit('/', 1)[1]}" if "/" in name else ""
        kind = f"{word} {name.split('-')[0]}{rank}"
        return kind, lambda: faults.send(config, name, number)

    kills = [kill(name, signal.SIGKILL) for name in targets(config)]
    stops = [kill(name, signal.SIGSTOP) for name in targets(config)]
    flips: list[Action] = [("bit-flip", lambda: faults.flip_bit(config, chance))]
    crashes = [kill(name, signal.SIGSEGV) for name in targets(config) if name.startswith("worker")]
    rounds = {
        "kill-each": kills,
        "zombie": stops,
        "bit-flip": flips,
        "memory": [],
        "mixed": kills + stops + crashes + flips * 4,
    }
    chosen = list(rounds[scenario])
    if scenario == "mixed":
        chance.shuffle(chosen)
    return chosen


SCENARIOS = ("kill-each", "zombie", "bit-flip", "memory", "mixed")


async def run(
    scenario: str,
    config: Config,
    traffic: Traffic,
    duration_s: float,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], list[Event]]:
    """Do it. Stops early at the first lost or different stream, which is then in the rows."""
    chance = random.Random(seed)
    await traffic.learn()
    traffic.start()
    events: list[Event] = []
    deadline = time.monotonic() + duration_s
    pending: list[Action] = []
    judged = 0
    try:
        while time.monotonic() < deadline:
            wrong = next((o for o in traffic.outcomes[judged:] if traffic.verdict(o) != "identical"), None)
            judged = len(traffic.outcomes)
            if wrong is not None:
                say(f"stop: a stream is {traffic.verdict(wrong)}: {traffic.difference(wrong)}")
                break
            pending = pending or actions(scenario, config, chance)
            if not pending:
                await asyncio.sleep(SETTLE_S)
                continue
            kind, do = pending.pop(0)
            try:
                events.append(Event(kind, do(), time.monotonic()))
            except faults.NothingToDoError as reason:
                say(f"skip {kind}: {reason}")
                await asyncio.sleep(SETTLE_S)
                continue
            event = events[-1]
            event.recovered = await _recovered(traffic, event)
            event.until = time.monotonic()
            say(f"{event.what}: back after {1000 * (event.until - event.at):.0f} ms")
            if not event.recovered:
                say(f"stop: no recovery within {RECOVERY_S:.0f} s")
                break
            await asyncio.sleep(SETTLE_S)
    finally:
        await traffic.finish()
    return tabulate(traffic, events), events


async def _recovered(traffic: Traffic, event: Event) -> bool:
    """Wait until the server says it is ready again, after it could notice that it is not."""
    deadline = event.at + RECOVERY_S
    await asyncio.sleep(0.3)
    while time.monotonic() < deadline:
        if await traffic.client.ready():
            return True
        await asyncio.sleep(0.05)
    return False


def tabulate(traffic: Traffic, events: list[Event]) -> list[Row]:
    """A row for each kind of fault, over the streams that were in flight at it, and one for all."""
    rows: dict[str, Row] = {}
    for event in events:
        row = rows.setdefault(event.kind, Row(event.kind))
        row.faults += 1
        for outcome in traffic.outcomes:
            if outcome.begun <= event.at <= outcome.ended:
                _count(row, outcome, traffic)
                row.pauses_ms.append(outcome.longest_gap_ms(event.at, event.until or outcome.ended))
    total = Row("all streams", len(events))
    for outcome in traffic.outcomes:
        _count(total, outcome, traffic)
    return [*rows.values(), total]


def _count(row: Row, outcome: Outcome, traffic: Traffic) -> None:
    row.streams += 1
    verdict = traffic.verdict(outcome)
    setattr(row, verdict, getattr(row, verdict) + 1)
