"""Contention of real processes, and elections: no increment is lost, and at most one process leads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.coordination.election import Election, Term
from pipeline.coordination.interface import Change, CoordinationStore
from pipeline.coordination.memory import MemoryStore
from pipeline.errors import StorageUnavailable
from tests.fleet.coordination_stores import Clock, until

ROOT = Path(__file__).resolve().parents[2]

OPENING = """
import sys
from pipeline.config.load import resolve
from pipeline.coordination import address
def open_store():
    return address.open_store(resolve({"fleet": {"store": sys.argv[1]}}, {}))
"""
COUNTING = (
    OPENING
    + """
import asyncio
async def main():
    async with open_store() as store:
        print("ready", flush=True)
        sys.stdin.readline()
        done = 0
        while done < 40:
            item = await store.get("count")
            value = int(item.value) if item else 0
            revision = await store.swap("count", item.revision if item else 0, str(value + 1).encode())
            if revision is not None:
                print(value + 1, revision, flush=True)
                done += 1
asyncio.run(main())
"""
)


@pytest.mark.slow
def test_increments_of_several_processes_are_all_counted(address: list[str]) -> None:
    """Compare-and-swap under contention: no increment is lost, and none gets the revision of another."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COUNTING, *address]
    processes = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [line for process in processes for line in process.communicate(timeout=240)[0].splitlines()]
    values = sorted(int(line.split()[0]) for line in lines)
    revisions = {int(line.split()[1]) for line in lines}
    assert values == list(range(1, 161))
    assert len(revisions) == 160


# ------------------------------------------------------------------ elections


async def test_one_of_many_candidates_leads_and_a_later_term_has_a_greater_fence(
    timed: CoordinationStore, clock: Clock
) -> None:
    terms: list[Term] = []
    waiting: set[str] = set()

    class Candidate(Election):
        async def _wait_for_end(self) -> None:
            waiting.add(name := self._identity.decode())
            try:
                await super()._wait_for_end()
            finally:
                waiting.discard(name)

    async def candidate(name: str) -> None:
        terms.append(await Candidate(timed, "leader", name.encode(), 10, clock=clock).campaign())

    tasks = [asyncio.create_task(candidate(name)) for name in "abcd"]
    for number in range(1, 5):
        # A candidate that asks for its lease while the clock jumps gets a term that is over when it begins.
        await until(lambda number=number: (len(terms), len(waiting)) == (number, 4 - number))  # type: ignore[misc]
        assert sum(term.is_valid for term in terms) == 1
        clock.now += 10.1  # the leader does not renew
    await asyncio.gather(*tasks)
    fences = [term.fence for term in terms]
    assert fences == sorted(set(fences))


async def test_a_leader_stops_before_the_store_lets_another_one_lead(timed: CoordinationStore, clock: Clock) -> None:
    term = await Election(timed, "leader", b"a", 10, clock=clock).campaign()
    clock.now += 8.1
    assert not term.is_valid
    assert await timed.get("leader") is not None  # for the store its lease still lasts


async def test_a_write_of_an_earlier_term_is_refused(timed: CoordinationStore, clock: Clock) -> None:
    old = await Election(timed, "leader", b"a", 10, clock=clock).campaign()
    assert await timed.transact((old.condition,), (Change("placement", b"1"),)) is not None
    clock.now += 11
    new = await Election(timed, "leader", b"b", 10, clock=clock).campaign()
    assert await timed.transact((old.condition,), (Change("placement", b"old"),)) is None
    assert await timed.transact((new.condition,), (Change("placement", b"2"),)) is not None
    assert new.fence > old.fence


class Broken(MemoryStore):
    """Renews nothing while it is down."""

    is_down = False

    async def renew(self, lease: str) -> bool:
        if self.is_down:
            raise StorageUnavailable("down")
        return await super().renew(lease)


async def test_a_leader_that_cannot_renew_ends_its_term_in_time() -> None:
    clock = Clock()
    store = Broken(clock)

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        await asyncio.sleep(0)

    election = Election(store, "leader", b"a", 10, clock=clock, sleep=sleep)
    term = await election.campaign()
    begun = clock.now
    holding = asyncio.create_task(election.hold(term))
    await until(lambda: clock.now > begun + 50)
    assert term.is_valid
    store.is_down = True
    failed = clock.now
    await holding
    assert not term.is_valid
    assert clock.now - failed < 10
    store.is_down = False
    assert await store.get("leader") is None  # it has resigned


LEADING = (
    OPENING
    + """
import asyncio, os, time
from pipeline.coordination.election import Election
async def main():
    async with open_store() as store:
        election = Election(store, "leader", str(os.getpid()).encode(), 1.0)
        while True:  # a busy machine may end a term, too
            term = await election.campaign()
            holding = asyncio.create_task(election.hold(term))
            while not holding.done():
                now = time.monotonic()
                if term.is_valid:
                    print(os.getpid(), term.fence, now, flush=True)
                await asyncio.sleep(0.02)
asyncio.run(main())
"""
)


@pytest.mark.slow
def test_leaders_of_real_processes_never_overlap_though_they_are_killed_and_stopped(
    address: list[str], tmp_path: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with log.open("ab") as output:
        command = [sys.executable, "-c", LEADING, *address]
        processes = [subprocess.Popen(command, env=env, stdout=output) for _ in range(4)]
    try:
        led: list[int] = []
        for action in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            deadline = time.monotonic() + 120
            while (leader := _last_leader(log)) in (None, *led) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert leader is not None
            assert leader not in led
            led.append(leader)
            if action == signal.SIGSTOP:
                _stop(leader, *address)
            else:
                os.kill(leader, action)
        before = _last_fence(log)
        os.kill(led[1], signal.SIGCONT)  # it must not go on leading, but may be elected again
        deadline = time.monotonic() + 120
        while _last_fence(log) <= before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _last_fence(log) > before
    finally:
        for process in processes:
            process.kill()
            process.wait()
    rows = [line.split() for line in log.read_text().splitlines()]
    spans: dict[int, tuple[float, float]] = {}
    for _, fence, now in rows:
        first, _ = spans.get(int(fence), (float(now), 0.0))
        spans[int(fence)] = first, float(now)
    ordered = [spans[fence] for fence in sorted(spans)]
    assert len(ordered) >= 4
    for (_, end), (begin, _) in pairwise(ordered):
        assert end < begin


def _stop(leader: int, address: str) -> None:
    """Stop a process between two transactions: within one it would keep all others out of a SQLite file."""
    with contextlib.ExitStack() as stack:
        if address.startswith("sqlite:"):
            path = address.removeprefix("sqlite:")
            database = stack.enter_context(contextlib.closing(sqlite3.connect(path, 60.0, isolation_level=None)))
            database.execute("BEGIN IMMEDIATE")
        os.kill(leader, signal.SIGSTOP)
        os.waitid(os.P_PID, leader, os.WSTOPPED | os.WNOWAIT)  # all of its threads stand still


def _last(log: Path) -> list[str]:
    """Process, fence and time of the last line that is complete."""
    lines = [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return lines[-1] if lines else []


def _last_leader(log: Path) -> int | None:
    return int(_last(log)[0]) if _last(log) else None


def _last_fence(log: Path) -> int:
    return int(_last(log)[1])
