"""Compiles the kernels for this host's CPU before the first model is asked for (`starling prepare --kernels`).

On a fresh host the first engine would compile them, which takes most of a minute of CPU time.  One process does it
once after the start of the agent, at the lowest priority, and ends with the agent.  Kernels that are stored already
cost its imports alone.

    an engine starts meanwhile    the process is ended: the engine compiles what is missing, at its own priority;
                                  what is stored stays.  The rest is compiled when no model is loading
    it fails, or takes too long   a warning: engines compile by themselves

Used in one event loop, in the main thread.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.fleet.bodies import Progress
from stages.agent.engines.child import Child

log = logging.getLogger("starling.agent")

COMMAND = (sys.executable, "-P", "-m", "starling", "prepare", "--with-parent")
BUILD_S = 1800.0  # for all kernels, at the lowest priority on a busy machine
CHECK_S = 2.0  # between two checks whether a model is loading
PAUSE_CHECKS = 5  # such intervals pass after an interruption before the first look
PHASE = "compile kernels"
_LINE = re.compile(rf"{PHASE} ([0-9]{{1,4}}) of ([0-9]{{1,4}})")


class KernelBuild:
    """One per agent. `is_loading`: whether a model of this host is being loaded."""

    def __init__(
        self,
        kv_types: Collection[str],
        env: Mapping[str, str],
        cwd: Path,
        is_loading: Callable[[], bool],
        *,
        command: tuple[str, ...] = COMMAND,
        build_s: float = BUILD_S,
        check_s: float = CHECK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kv_types`: of the KV caches of this host's models. `env`, `cwd`: of the process."""
        self._command = (*command, *(word for kv_type in sorted(kv_types) for word in ("--kernels", kv_type)))
        self._env = env
        self._cwd = cwd
        self._is_loading = is_loading
        self._build_s = build_s
        self._check_s = check_s
        self._clock = clock
        self._child: Child | None = None
        self._is_interrupted = False
        self._is_closed = False

    @property
    def progress(self) -> Progress | None:
        """How many kernels are stored, while they are compiled; None: nothing is compiled."""
        child = self._child
        if child is None:
            return None
        found = next((match for line in reversed(child.lines) if (match := _LINE.search(line))), None)
        done, total = (int(found[1]), int(found[2])) if found is not None else (0, 0)
        return Progress(phase=PHASE, done=done, total=total)

    async def run(self) -> None:
        """Compile what is missing. Returns when that is done, has failed, or is not to be done any more."""
        begun = self._clock()
        while not self._is_closed:
            if self._is_loading():
                await asyncio.sleep(self._check_s)
                continue
            reason = await self._run_once()
            if reason:
                log.warning("the kernels were not compiled: engines compile them", extra={"reason": reason})
            elif not self._is_interrupted:
                log.info("the kernels are compiled", extra={"seconds": round(self._clock() - begun, 1)})
            if not self._is_interrupted:
                return
            # The engine that interrupts is about to start, which is not seen at once.
            await asyncio.sleep(PAUSE_CHECKS * self._check_s)

    async def interrupt(self) -> None:
        """An engine is going to start. Idempotent."""
        if self._child is not None:
            self._is_interrupted = True
            await self._child.stop(0.0)

    async def stop(self) -> None:
        """End it, for good. Idempotent."""
        self._is_closed = True
        await self.interrupt()

    async def _run_once(self) -> str:
        """Let one process compile; why it has failed, "" if it has not, or was interrupted."""
        self._is_interrupted = False
        child = self._child = Child(self._command, self._env, self._cwd)
        try:
            await child.start()
            if self._is_interrupted:  # meanwhile: there was nothing to end yet
                return ""
            async with asyncio.timeout(self._build_s):
                code = await child.wait()
            return "" if self._is_interrupted or not code else await child.last_words_at_end()
        except TimeoutError:
            return f"it did not end in {self._build_s:.0f} s"
        except ConfigError as error:
            return error.message
        finally:
            self._child = None
            await child.stop(0.0)
