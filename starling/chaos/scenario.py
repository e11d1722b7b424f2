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
from functools import partial
from typing import NamedTuple

from pipeline.config.schema import Config
from pipeline.models import versions
from starling.chaos import faults
from starling.chaos.resources import Vitals
from starling.chaos.traffic import Outcome, Traffic

RECOVERY_S = 60.0
DISK_S = 4.0  # a disk stays full or slow
PRESS_S = 6.0  # long prompts press each other out of the arena
WATCH_S = 5.0  # between two looks at what the server uses
SETTLE_S = 1.0  # between a recovery and the next fault, so that one is not measured as the other


@dataclass
class Event:
    """A fault that was done. Times are of the monotonic clock, s."""

    kind: str
    what: str
    at: float
    over: float = 0.0  # 0.0: it was a moment
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
            "fault": self.fault,
            "faults": self.faults,
            "streams": self.streams,
            "identical": self.identical,
            "different": self.different,
            "lost": self.lost,
            "pause_ms_p50": round(statistics.median(ordered), 1) if ordered else None,
            "pause_ms_p95": at(0.95),
            "pause_ms_max": at(1.0),
        }


class Action(NamedTuple):
    """A fault that may be done. One that lasts is ended after `hold_s`."""

    kind: str
    do: Callable[[], str]
    end: Callable[[], object] | None = None
    hold_s: float = 0.0
    refuses_sessions: bool = False  # meanwhile a turn cannot be kept, and is refused as it should be
    must_be: bool = False  # there is always something to do, or the scenario is void


def targets(config: Config) -> list[str]:
    """Processes that must be expendable: everything but the gateway, whose death ends connections.

    The workers of a model that has just been unloaded may still be about; they have nothing to lose.
    """
    serving = {one.stage for one in versions.read(config).versions if one.state == "serving"}
    stages = {name: name.partition("/")[0] for name in faults.processes(config) if name != "gateway"}
    return sorted(name for name, stage in stages.items() if not stage.startswith("worker") or stage in serving)


def actions(scenario: str, config: Config, traffic: Traffic, chance: random.Random) -> list[Action]:
    """One round of the scenario, in order."""
    instances = versions.read(config).versions
    models = {one.stage: one.name for one in instances}

    def kill(name: str, number: signal.Signals) -> Action:
        word = {signal.SIGKILL: "kill", signal.SIGSTOP: "stop", signal.SIGSEGV: "segv"}[number]
        rank = f"/{name.rsplit('/', 1)[1]}" if "/" in name else ""
        kind = f"{word} {name.split('-')[0]}{rank}"
        return Action(kind, lambda: faults.send(config, heir(name), number))

    def heir(name: str) -> str:
        """The process that has this one's work now: a reload gives a model's worker another name."""
        stage, _, rank = name.partition("/")
        serving = [one for one in versions.read(config).versions if one.state == "serving"]
        heirs = [one.stage for one in serving if one.name == models.get(stage)]
        return "/".join(filter(None, (heirs[0], rank))) if heirs else name

    kills = [kill(name, signal.SIGKILL) for name in targets(config)]
    stops = [kill(name, signal.SIGSTOP) for name in targets(config)]
    flips = [Action("bit-flip", lambda: faults.flip_bit(config, chance))]
    crashes = [kill(name, signal.SIGSEGV) for name in targets(config) if name.startswith("worker")]
    full = faults.FullDisk(config)
    slow = faults.SlowDisk(config, chance.choice((5, 20, 80)))
    fulls = [Action("disk-full", full.begin, full.end, DISK_S, refuses_sessions=True)]
    slows = [Action("slow-disk", slow.begin, slow.end, DISK_S)]
    is_all = scenario == "reload"
    served = [one.name for one in instances if one.state == "serving"]  # now, whatever is configured
    reloads = [Action("reload", partial(faults.reload, name), must_be=is_all) for name in served]
    presses = [Action("memory", traffic.press, traffic.relent, PRESS_S)] if traffic.can_press else []
    rounds = {
        "kill-each": kills,
        "zombie": stops,
        "bit-flip": flips,
        "memory": [],
        "disk-full": fulls,
        "slow-disk": slows,
        "reload": reloads,
        "mixed": kills + stops + crashes + flips * 4 + fulls + slows + presses + reloads,
    }
    chosen = list(rounds[scenario])
    if scenario == "mixed":
        chance.shuffle(chosen)
    return chosen


SCENARIOS = ("kill-each", "zombie", "disk-full", "slow-disk", "bit-flip", "memory", "reload", "mixed")


async def run(
    scenario: str,
    config: Config,
    traffic: Traffic,
    duration_s: float,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], Vitals]:
    """Do it. Stops early at the first lost or different stream, which is then in the rows.

    Raises `RuntimeError` when the undisturbed run fails, or the scenario has nothing to do.
    """
    chance = random.Random(seed)
    await traffic.learn()
    traffic.start()
    vitals = Vitals(config)
    watcher = asyncio.create_task(_watch(vitals, min(WATCH_S, duration_s / 4)))
    try:
        events = await _torment(scenario, config, traffic, duration_s, chance, say)
    finally:
        await traffic.finish()
        watcher.cancel()
    await asyncio.to_thread(vitals.look)
    return tabulate(traffic, events), vitals


async def _watch(vitals: Vitals, every_s: float) -> None:
    """The first look comes when the traffic has filled what it fills."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(vitals.look)


async def _torment(
    scenario: str,
    config: Config,
    traffic: Traffic,
    duration_s: float,
    chance: random.Random,
    say: Callable[[str], None],
) -> list[Event]:
    """Faults, one after the other, until the time is up or a stream is wrong."""
    events: list[Event] = []
    deadline = time.monotonic() + duration_s
    pending: list[Action] = []
    judged = 0
    while time.monotonic() < deadline:
        wrong = next((o for o in traffic.outcomes[judged:] if traffic.verdict(o) != "identical"), None)
        judged = len(traffic.outcomes)
        if wrong is not None:
            say(f"stop: a stream is {traffic.verdict(wrong)}: {traffic.difference(wrong)}")
            break
        pending = pending or actions(scenario, config, traffic, chance)
        if not pending:
            await asyncio.sleep(SETTLE_S)
            continue
        action = pending.pop(0)
        if action.refuses_sessions:
            await traffic.without_sessions()
        event = Event(action.kind, "", time.monotonic())
        try:
            event.what = await asyncio.to_thread(action.do)
        except faults.NothingToDoError as reason:
            if action.must_be:
                raise RuntimeError(str(reason)) from None
            say(f"skip {action.kind}: {reason}")
            await asyncio.sleep(SETTLE_S)
            continue
        events.append(event)
        if action.end is not None:
            try:
                await asyncio.sleep(action.hold_s)
            finally:
                action.end()
                event.over = time.monotonic()
        event.recovered = await _recovered(traffic, time.monotonic())
        event.until = time.monotonic()
        traffic.has_sessions = True
        say(f"{event.what}: back after {1000 * (event.until - event.at):.0f} ms")
        if not event.recovered:
            say(f"stop: no recovery within {RECOVERY_S:.0f} s")
            break
        await asyncio.sleep(SETTLE_S)
    return events


async def _recovered(traffic: Traffic, since: float) -> bool:
    """Wait until the server says it is ready again, after it could notice that it is not."""
    deadline = since + RECOVERY_S
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
            if outcome.begun <= max(event.at, event.over) and outcome.ended >= event.at:
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
