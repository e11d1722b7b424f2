"""Engines that are started before their model is known: `starling up --standby` (starling/cli/standby.py).

The imports of a server's processes take longer than all else of the start of an engine whose model is in memory.  A
standby engine is one process that has done them.  It is used for one engine, and replaced when no engine has been
starting for `REFILL_S`, so that its imports do not take the cores from a new engine's first requests.  One that has
died is replaced after growing pauses: engines start without it meanwhile.

It is not used
- if the project's files have changed since it was started: an upgrade;
- after an engine that was one has failed to start, until one has started without.

It is ended when the host is short of memory, and when a model would not fit otherwise.

Used in one event loop, in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline import cgroup, procfs
from pipeline.errors import ConfigError
from pipeline.fleet.standby import MARK_VARIABLE, WAITING
from pipeline.runtime.code_stamp import code_stamp
from stages.agent.disk_threads import ENGINES
from stages.agent.engines.child import Child

log = logging.getLogger("starling.agent")

REFILL_S = 2.0
CHECK_S = 5.0  # between two checks of the memory of the host, and for the end of a standby engine
MAX_PAUSE_S = 600.0  # until one that has died is replaced
SCARCE = 0.05  # of the memory of the host, or of its control group: with less available, standby engines are ended
AMPLE = 0.10  # with less available, none is started


class StandbyEngine:
    """A process that waits for a home; `mark` is in the environment of it and of its descendants."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str], cwd: Path, code: str) -> None:
        """`code`: stamp of the project's files before it is started."""
        self.mark = secrets.token_hex(16)
        self.code = code
        self.is_outdated = False
        self.child = Child(command, {**env, MARK_VARIABLE: self.mark}, cwd, has_input=True)

    @property
    def is_waiting(self) -> bool:
        """Whether it has imported everything."""
        return self.child.is_running and WAITING in self.child.lines


class Standby:
    """Those of one agent. `count`: how many; 0: none."""

    def __init__(
        self,
        count: int,
        command: tuple[str, ...],
        env: Mapping[str, str],
        cwd: Path,
        *,
        refill_s: float = REFILL_S,
        check_s: float = CHECK_S,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[], float] | None = None,
        code: Callable[[], str] = code_stamp,
    ) -> None:
        """`command`, `env`, `cwd`: of a standby engine. `free`: the part of the memory that is available."""
        self._count = count
        self._command = command
        self._env = env
        self._cwd = cwd
        self._refill_s = refill_s
        self._check_s = check_s
        self._clock = clock
        self._free = free or free_memory
        self._code = code
        self._engines: list[StandbyEngine] = []
        self._starting = 0  # engines
        self._deaths = 0  # in a row, of those that waited for a home
        self._is_distrusted = False
        self._not_before = 0.0  # of the next start
        self._given_up = 0  # times
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def engines(self) -> tuple[StandbyEngine, ...]:
        """Those that are started."""
        return tuple(self._engines)

    @property
    def waiting(self) -> int:
        """How many could become an engine at once."""
        return sum(one.is_waiting for one in self._engines)

    def keep(self) -> None:
        """From now on start what is missing."""
        if self._count and self._keeper is None and not self._is_closed:
            self._keeper = asyncio.create_task(self._keep())

    # ------------------------------------------------------------------ starts of engines

    def begin_start(self) -> None:
        """An engine starts; `end_start` follows."""
        self._starting += 1

    async def claim(self) -> StandbyEngine | None:
        """One for the engine that starts, those first that have imported everything. None: it starts by itself."""
        if not self._engines or self._is_distrusted:
            return None
        code = await ENGINES.run(self._code)
        # No engine of the pool is in two hands: nothing is awaited from here on.
        for one in self._engines:
            one.is_outdated |= one.code != code
        alive = [one for one in self._engines if one.child.is_running and code and not one.is_outdated]
        if not alive:
            return None
        chosen = max(alive, key=lambda one: one.is_waiting)
        self._engines.remove(chosen)
        return chosen

    def end_start(self, *, was_standby: bool, is_ready: bool | None) -> None:
        """The engine answers, or does not; None: it was ended before. `was_standby`: it was one."""
        self._starting -= 1
        if was_standby and is_ready is False:
            self._is_distrusted = True
        elif is_ready and not was_standby:
            self._is_distrusted = False
        self._not_before = max(self._not_before, self._clock() + self._refill_s)
        self._wake.set()

    # ------------------------------------------------------------------ their number

    async def give_up(self, reason: str, pause_s: float = 0.0) -> bool:
        """End all; whether there were any. They are started again when there is memory, but not for `pause_s`.

        Without any, their memory is of no use to the caller: there is no pause.
        """
        self._given_up += 1
        engines, self._engines = self._engines, []
        if engines:
            self._not_before = max(self._not_before, self._clock() + pause_s)
        await asyncio.gather(*(one.child.stop(0.0) for one in engines))
        if engines:
            log.info("standby engines are ended", extra={"reason": reason, "engines": len(engines)})
        return bool(engines)

    async def stop(self) -> None:
        """End all, for good. Idempotent."""
        self._is_closed = True
        self._wake.set()
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
        await self.give_up("the agent ends")

    async def _keep(self) -> None:
        while not self._is_closed:
            self._wake.clear()
            try:
                await self._check()
            except Exception:
                log.exception("internal error")  # engines start without
            left_s = self._not_before - self._clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._check_s, left_s) if left_s > 0 else self._check_s):
                    await self._wake.wait()

    async def _check(self) -> None:
        if self._engines and self._free() < SCARCE:
            await self.give_up("the host is short of memory")
        for one in self.engines:
            if one not in self._engines or not (one.is_outdated or not one.child.is_running):
                continue  # ended or taken while another one was waited for, or in order
            self._engines.remove(one)
            if not one.is_outdated:
                self._deaths += 1
                pause_s = min(MAX_PAUSE_S, self._refill_s * 2**self._deaths)
                self._not_before = self._clock() + pause_s
                reason = await one.child.last_words_at_end()
                log.warning("a standby engine has ended", extra={"reason": reason, "wait_s": pause_s})
            await one.child.stop(0.0)
        if self.waiting:
            self._deaths = 0
        while len(self._engines) < self._count and self._may_start():
            await self._start()

    def _may_start(self) -> bool:
        return (
            not self._is_closed and not self._starting and self._clock() >= self._not_before and self._free() >= AMPLE
        )

    async def _start(self) -> None:
        given_up, code = self._given_up, await ENGINES.run(self._code)
        engine = StandbyEngine(self._command, self._env, self._cwd, code)
        try:
            await engine.child.start()
        except ConfigError as error:
            self._not_before = self._clock() + MAX_PAUSE_S
            log.warning("no standby engine", extra={"reason": error.message})
            return
        if given_up != self._given_up:  # meanwhile
            await engine.child.stop(0.0)
        else:
            self._engines.append(engine)


def free_memory() -> float:
    """The part of the memory of the host that is available, or of the control group where that is less."""
    parts = [procfs.available_memory() / procfs.total_memory()]
    group = cgroup.read()
    if group.memory and group.memory_free is not None:
        parts.append(group.memory_free / group.memory)
    return min(parts)
