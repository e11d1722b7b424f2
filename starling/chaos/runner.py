"""Runs a scenario: injects its faults at intervals under traffic until the time has passed or a byte is wrong.

record the undisturbed answers -> start traffic -> (fault, recovery) * -> finish traffic -> table
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from pipeline.config.schema import Config
from starling.chaos.processes import NoTargetError
from starling.chaos.report import Event, Row, tabulate
from starling.chaos.resources import UsageHistory
from starling.chaos.scenario import Action, actions
from starling.chaos.traffic import Traffic

RECOVERY_S = 60.0  # until a server that is not ready again counts as lost
NOTICE_S = 0.3  # after a fault, until /ready is requested
SAMPLE_S = 5.0  # between two samples of the server's resources
SETTLE_S = 1.0  # between a recovery and the next fault, so that its pauses are not counted for that one


async def run(
    scenario: str,
    config: Config,
    traffic: Traffic,
    duration_s: float,
    seed: int,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], UsageHistory]:
    """Run a scenario. Stops early at the first lost or different stream, which is then in the rows.

    `report` receives a line for each fault. Raises `RuntimeError` if the undisturbed run fails, or if the scenario has
    no target.
    """
    rng = random.Random(seed)
    await traffic.record_expected()
    traffic.start()
    usage = UsageHistory(config)
    watcher = asyncio.create_task(_watch(usage, min(SAMPLE_S, duration_s / 4)))
    try:
        events = await _inject(scenario, config, traffic, duration_s, rng, report)
    finally:
        await traffic.finish()
        watcher.cancel()
    await asyncio.to_thread(usage.sample)
    return tabulate(traffic, events), usage


async def _watch(usage: UsageHistory, every_s: float) -> None:
    """Sample the resources, first after `every_s`, when the traffic has filled caches and buffers."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(usage.sample)


async def _inject(
    scenario: str,
    config: Config,
    traffic: Traffic,
    duration_s: float,
    rng: random.Random,
    report: Callable[[str], None],
) -> list[Event]:
    """Inject faults one after the other until the time has passed or a stream is lost or different."""
    events: list[Event] = []
    deadline = time.monotonic() + duration_s
    pending: list[Action] = []
    judged = 0
    while time.monotonic() < deadline:
        wrong = next((o for o in traffic.outcomes[judged:] if traffic.verdict(o) != "identical"), None)
        judged = len(traffic.outcomes)
        if wrong is not None:
            report(f"stop: a stream is {traffic.verdict(wrong)}: {traffic.difference(wrong)}")
            break
        pending = pending or actions(scenario, config, traffic, rng)
        if not pending:
            await asyncio.sleep(SETTLE_S)
            continue
        action = pending.pop(0)
        if action.refuses_sessions:
            await traffic.pause_sessions()
        event = Event(action.kind, "", time.monotonic())
        try:
            event.what = await asyncio.to_thread(action.do)
        except NoTargetError as reason:
            if action.is_required:
                raise RuntimeError(str(reason)) from None
            report(f"skip {action.kind}: {reason}")
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
        report(f"{event.what}: ready again after {1000 * (event.until - event.at):.0f} ms")
        if not event.recovered:
            report(f"stop: no recovery within {RECOVERY_S:.0f} s")
            break
        await asyncio.sleep(SETTLE_S)
    return events


async def _recovered(traffic: Traffic, since: float) -> bool:
    """Wait until the server reports that it is ready. The first request comes after it could notice the fault."""
    deadline = since + RECOVERY_S
    await asyncio.sleep(NOTICE_S)
    while time.monotonic() < deadline:
        if await traffic.client.ready():
            return True
        await asyncio.sleep(0.05)
    return False
