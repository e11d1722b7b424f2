"""One model on this host: download, engine, restarts, end.

    DOWNLOADING -> LOADING_TO_GPU -> READY -> (the engine ends) -> LOADING_TO_GPU ...
         `--------------`--------------> FAILED, with the reason

One task owns the engine.  Callers that wait for the model wait for a change of the state.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable

from pipeline.catalog.entry import Entry
from pipeline.errors import Conflict, ModelUnavailable, StarlingError
from pipeline.fleet.bodies import ModelState, Progress
from pipeline.supervise.restart_policy import RestartPolicy
from stages.agent.engines.interface import Capabilities, Engine, EngineDied, Queue
from stages.agent.engines.local_model import LocalModel

log = logging.getLogger("starling.agent")

FIRST_DEATHS = 3  # more in a short time, and the agent reports that the engine keeps dying

Bring = Callable[["Placement"], Awaitable[None]]
Source = Entry | LocalModel  # a published model, or one of `fleet.agent.engines`
MakeEngine = Callable[[Source], Engine]


class Placement:
    """A model that this agent serves, or tries to."""

    def __init__(
        self,
        entry: Source,
        bring: Bring,
        make_engine: MakeEngine,
        is_open: Callable[[], bool],
        *,
        next_incarnation: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """bring: makes the model's files be here.  is_open: whether engines may take requests now.

        next_incarnation: a number that no engine of this agent's process has had.
        """
        self.model_id = entry.name
        self.entry = entry
        self.state: ModelState = "DOWNLOADING"
        self.progress: Progress | None = None
        self.engine: Engine | None = None
        self.incarnation = 0  # of the engine; 0: none was ready yet
        self._next_incarnation = next_incarnation or itertools.count(1).__next__
        self.restarts = 0
        self.load_s = 0.0
        self.error: StarlingError | None = None
        self.last_death = ""
        self.queue = Queue()
        self._bring = bring
        self._make_engine = make_engine
        self._is_open = is_open
        self._clock = clock
        self._sleep = sleep
        self._policy = RestartPolicy(jitter)
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def is_dying(self) -> bool:
        """Whether the engine keeps dying."""
        return self._policy.deaths > FIRST_DEATHS

    @property
    def capabilities(self) -> Capabilities:
        """Of the engine; nothing is promised without one."""
        return self.engine.capabilities if self.engine is not None else Capabilities()

    async def wait(self) -> None:
        """Wait until the model is ready. Raises the `StarlingError` for which it failed."""
        while self.state not in ("READY", "FAILED", "UNLOADED"):
            await self._changed.wait()
        if self.state == "FAILED":
            assert self.error is not None
            raise self.error
        if self.state == "UNLOADED":
            raise ModelUnavailable(f"{self.model_id!r} was unloaded meanwhile", "model_id")

    async def stop(self) -> None:
        """End the engine, with time for its streams. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._set("UNLOADED")

    async def measure(self) -> None:
        """Update `queue`."""
        if self.engine is not None and self.state == "READY":
            try:
                self.queue = await self.engine.queue()
            except EngineDied:
                return  # `_run` learns of its end by itself

    async def check_idle(self) -> None:
        """Raise `Conflict` if the engine has requests, as of its last metrics."""
        await self.measure()
        if has := self.queue.running + self.queue.waiting:
            raise Conflict(
                f"{self.model_id!r} has {has} requests: unload it when they have ended, or without only_idle",
                "only_idle",
            )

    async def open(self) -> None:
        """Let the engine take requests."""
        await self._switch(True)

    async def close(self) -> None:
        """Let the engine take no more requests, or end it."""
        await self._switch(False)

    async def _switch(self, is_open: bool) -> None:
        if self.engine is None or self.state != "READY":
            return
        try:
            await (self.engine.resume() if is_open else self.engine.suspend())
        except EngineDied as error:
            log.warning("an engine is ended", extra={"model": self.model_id, "reason": error.message})
            await self.engine.stop(at_once=True)

    def note_progress(self, phase: str, done: int, total: int) -> None:
        """How far the download is."""
        self.progress = Progress(phase=phase, done=done, total=total)

    def _set(self, state: ModelState) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        try:
            await self._bring(self)
            while True:
                await self._one_start(self.entry)
        except StarlingError as error:
            self.error = error
            self._set("FAILED")
            log.error("model failed", extra={"model": self.model_id, "reason": error.message})
        except asyncio.CancelledError:
            raise
        except Exception:
            self.error = StarlingError("INTERNAL", "internal error of the agent; its log has the details")
            self._set("FAILED")
            log.exception("internal error", extra={"model": self.model_id})

    async def _one_start(self, entry: Source) -> None:
        """Start an engine, and return when it may be started again. Raises `StarlingError` to give up."""
        self.progress = Progress(phase="load")
        self._set("LOADING_TO_GPU")
        begun = ready_at = self._clock()
        engine = self._make_engine(entry)
        was_ready = False
        try:
            try:
                await engine.start()
                self.engine = engine
                await engine.ready()
                is_suspended = not self._is_open()
                if is_suspended:
                    await engine.suspend()
                was_ready, ready_at, self.progress = True, self._clock(), None
                self.load_s = ready_at - begun
                self.incarnation = self._next_incarnation()
                self._set("READY")
                if is_suspended and self._is_open():  # since the question
                    await engine.resume()
                log.info("model is ready", extra={"model": self.model_id, "url": engine.url, "s": self.load_s})
                raise await engine.ended()
            finally:
                self.queue = Queue()
                is_cancelled = (task := asyncio.current_task()) is not None and task.cancelling() > 0
                if not is_cancelled:
                    self._set("LOADING_TO_GPU")
                await _finished(engine.stop(at_once=not is_cancelled))
        except EngineDied as error:
            self.last_death = error.message
            log.warning("an engine has ended", extra={"model": self.model_id, "reason": error.message})
            delay = (
                None
                if error.is_final
                else self._policy.after_death(self._clock() - ready_at if was_ready else 0.0, was_ready)
            )
            if delay is None:
                raise
            self.restarts += 1
            await self._sleep(delay)


async def _finished(work: Awaitable[None]) -> None:
    """Wait for the end of `work`, cancelled or not: afterwards the task may be cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
