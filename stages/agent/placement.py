"""One model on this host: download, engine, restarts, end.

    DOWNLOADING -> LOADING_TO_GPU -> READY -> (the engine ends) -> LOADING_TO_GPU ...
         `--------------`--------------> FAILED, with the reason

An engine that computes layers as they arrive is started while the download goes on (`note_arriving`), and READY when
the rest is expected within `ADMIT_S`: until then clients get the progress of the download.  If the rest is later
expected after more than `WITHDRAW_S`, the model is DOWNLOADING again: its engine keeps the requests that it has, and
gets no others.  If the download fails, so does the placement, and its engine is ended.

One task owns the engine.  Callers that wait for the model wait for a change of the state.

An engine is started with the model's adapters.  One that comes later is loaded into the engine that runs, and is among
those of the next start.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

from pipeline.catalog.entry import Entry
from pipeline.errors import Conflict, ModelUnavailable, StarlingError
from pipeline.fleet.bodies import ModelState, Progress
from pipeline.supervise.restart_policy import RestartPolicy
from stages.agent.disk_threads import ENGINES, MODELS
from stages.agent.downloads.adapter import digest_of
from stages.agent.downloads.remaining import Remaining
from stages.agent.engines.interface import AdapterFile, AdapterUse, Capabilities, Engine, EngineDied, Queue
from stages.agent.engines.local_model import LocalModel

log = logging.getLogger("starling.agent")

ADMIT_S = 30.0  # of a download: for so long a request may wait in an engine for the last layers
WITHDRAW_S = 3 * ADMIT_S  # of a download: for longer, no more requests wait in an engine
ADMIT_POLL_S = 0.1
RESUME_S = 5.0  # for an engine to take requests again, though calls to it come late on a busy host
FIRST_DEATHS = 3  # more in a short time, and the agent reports that the engine keeps dying

Bring = Callable[["Placement"], Awaitable[None]]
Source = Entry | LocalModel  # a published model, or one of `fleet.agent.engines`
MakeEngine = Callable[[Source, Path | None], Engine]  # with the folder of a file that is still downloaded
Download = asyncio.Future[None]
T = TypeVar("T")


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
        release: Callable[[], object] = lambda: None,
        adapters: Iterable[AdapterFile] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """bring: makes the model's files be here.  is_open: whether engines may take requests now.

        next_incarnation: a number that no engine of this agent's process has had.
        release: called in a thread when engine and download have ended, and before the model is FAILED or UNLOADED.
        """
        self.model_id = entry.name
        self.entry = entry
        self.state: ModelState = "DOWNLOADING"
        self.progress: Progress | None = None
        self.engine: Engine | None = None
        self.incarnation = 0  # of the engine; 0: none was ready yet
        self._was_ready = False  # this engine, and it still runs
        self._next_incarnation = next_incarnation or itertools.count(1).__next__
        self.restarts = 0
        self.load_s = 0.0
        self.error: StarlingError | None = None
        self.last_death = ""
        self.queue = Queue()
        self._bring = bring
        self._make_engine = make_engine
        self._is_open = is_open
        self._release = release
        self._clock = clock
        self._sleep = sleep
        self._policy = RestartPolicy(jitter)
        self.adapters = {one.name: one for one in adapters}  # that engines are started with
        self.serving: dict[str, str] = {}  # the adapters of the engine: digest by name
        self._adapting = asyncio.Lock()
        self._switching = asyncio.Lock()  # one call lets the engine take requests, or ends that
        self._in_engine: set[str] = set()  # names of adapters that the engine may have, also those that left meanwhile
        self._proven: set[str] = set()  # digests of adapters with which an engine was ready
        self._refused: dict[str, StarlingError] = {}  # why an adapter is not among `adapters` any more, by its name
        self._arriving: Path | None = None
        self._remaining = Remaining(clock)
        self._may_start = asyncio.Event()
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

    async def measure(self) -> bool:
        """Update `queue`; false if the engine does not answer."""
        engine = self.engine
        if engine is not None and self._was_ready:
            try:
                queue = await engine.queue()
            except EngineDied:
                return False  # `_run` learns of its end by itself
            if engine is self.engine and self._was_ready:  # otherwise it has ended since, with its requests
                self.queue = queue
        return True

    def adapter_use(self, name: str) -> AdapterUse:
        """The requests that named an adapter, as of the engine's last metrics."""
        return self.queue.adapters.get(name, AdapterUse())

    async def check_adapter_idle(self, name: str) -> None:
        """Raise `Conflict` if an adapter has requests, as of the engine's last metrics, or these are not to be had."""
        await self._measure_now()
        if has := self.adapter_use(name).running:
            raise Conflict(
                f"{self.model_id}:{name} has {has} requests: unload it when they have ended, or without only_idle",
                "only_idle",
            )

    async def check_idle(self) -> None:
        """Raise `Conflict` if the engine has requests, as of its last metrics, or these are not to be had."""
        await self._measure_now()
        if has := self.queue.running + self.queue.waiting:
            raise Conflict(
                f"{self.model_id!r} has {has} requests: unload it when they have ended, or without only_idle",
                "only_idle",
            )

    async def _measure_now(self) -> None:
        """Update `queue`. Raises `Conflict` if the engine does not answer: it may have requests."""
        if not await self.measure():
            raise Conflict(
                f"the engine of {self.model_id!r} does not answer: unload it later, or without only_idle",
                "only_idle",
            )

    # ------------------------------------------------------------------ adapters

    async def add_adapter(self, added: AdapterFile, within_s: float) -> None:
        """Let requests name an adapter, from now on and at every start; returns when they may.

        Raises `StarlingError`; then the adapter is as it was before.
        """
        async with self._adapting:
            before = self.adapters.get(added.name)
            self._refused.pop(added.name, None)  # of an earlier one
            self.adapters[added.name] = added
            try:
                while not await self._has_loaded(added, within_s):
                    await self._sleep(ADMIT_POLL_S)  # the end of an engine that has died is seen soon
            except BaseException:
                self.adapters.pop(added.name, None)
                if before is not None and before != added:
                    self.adapters[added.name] = before
                raise

    async def _has_loaded(self, added: AdapterFile, within_s: float) -> bool:
        """Load an adapter unless the engine has it; false if the engine has died. Raises `StarlingError`."""
        await self.wait()
        while self.state != "READY" or self.progress is not None:  # a version beside it needs all weights
            await self._sleep(ADMIT_POLL_S)
            await self.wait()
        if self.adapters.get(added.name) != added:
            gone = ModelUnavailable(f"{self.model_id}:{added.name} was unloaded meanwhile", "model_id")
            raise self._refused.pop(added.name, gone)
        engine = self.engine
        if self.serving.get(added.name) == added.digest:
            return True
        if engine is None or not self._was_ready:
            return False
        try:
            await self._remove_strays(engine, within_s)
            if added.name in self.serving:  # with other matrices, which it may lose from now on
                self._serves({name: digest for name, digest in self.serving.items() if name != added.name})
            self._in_engine.add(added.name)
            await engine.load_adapter(added, within_s)
        except EngineDied:
            return False
        if engine is not self.engine or not self._was_ready:
            return False
        self._proven.add(added.digest)
        self._serves({**self.serving, added.name: added.digest})
        log.info("adapter is ready", extra={"model": f"{self.model_id}:{added.name}", "digest": added.digest})
        return True

    async def remove_adapter(self, name: str, within_s: float) -> None:
        """Let no more requests name an adapter; those that it has finish. Raises `StarlingError`.

        Idempotent: after an error or a cancellation it is removed by the next call, or before the next adapter comes.
        """
        async with self._adapting:
            self.adapters.pop(name, None)
            engine = self.engine
            if name in self.serving:
                self._serves({one: digest for one, digest in self.serving.items() if one != name})
            if name in self._in_engine and engine is not None and self._was_ready:
                try:
                    await engine.unload_adapter(name, within_s)
                except EngineDied:
                    return  # the next one is started without it
                if engine is self.engine:
                    self._in_engine.discard(name)

    async def _remove_strays(self, engine: Engine, within_s: float) -> None:
        """Remove what the engine has of adapters that have left. Raises `StarlingError`."""
        for name in sorted(self._in_engine - set(self.adapters)):
            await engine.unload_adapter(name, within_s)
            if engine is self.engine:
                self._in_engine.discard(name)

    async def _check_files(self) -> None:
        """Before a start: an adapter whose file is missing or damaged must not end the engine of all others."""
        for one in list(self.adapters.values()):
            if await MODELS.run(digest_of, one.path) != one.digest and self.adapters.get(one.name) == one:
                reason = "its file on this host is damaged or missing: it is fetched again when it is asked for"
                self._refuse(one, reason)

    def _refuse(self, one: AdapterFile, reason: str) -> None:
        self.adapters.pop(one.name, None)
        self._refused[one.name] = ModelUnavailable(f"{self.model_id}:{one.name} is not loaded: {reason}", "model_id")
        log.warning("an adapter is left out", extra={"model": f"{self.model_id}:{one.name}", "reason": reason})

    def _leave_out(self, engine: Engine, reason: str) -> bool:
        """After a final error at the start: whether an adapter may be the cause, which is left out from now on."""
        had = [one for one in engine.adapters if self.adapters.get(one.name) == one]
        for one in [one for one in had if one.digest not in self._proven] or had:
            self._refuse(one, reason)
        return bool(had)

    def _serves(self, adapters: dict[str, str]) -> None:
        """The engine has other adapters, which is another version with an empty KV cache."""
        self.serving = adapters
        self.incarnation = self._next_incarnation()
        self._set(self.state)

    # ------------------------------------------------------------------ requests

    async def open(self) -> None:
        """Let the engine take requests."""
        await self._switch(True)

    async def close(self) -> None:
        """Let the engine take no more requests, or end it."""
        await self._switch(False)

    async def _switch(self, is_open: bool) -> None:
        async with self._switching:
            engine = self.engine
            if engine is None or not self._was_ready:
                return
            try:
                await (self._resume(engine) if is_open else engine.suspend())
            except EngineDied as error:
                if engine is not self.engine or not self._was_ready:
                    return  # it has ended since, and what is started now is not to be ended
                log.warning("an engine is ended", extra={"model": self.model_id, "reason": error.message})
                await engine.stop(at_once=True)

    async def _resume(self, engine: Engine) -> None:
        """Let an engine take requests. Raises `EngineDied` if it does not answer in time, or the lease ends."""

        def may_again() -> bool:
            return self._is_open() and engine is self.engine and self._was_ready

        until = self._clock() + RESUME_S
        while True:
            try:
                return await engine.resume()
            except EngineDied:
                if not may_again() or self._clock() >= until:
                    raise
                await self._sleep(ADMIT_POLL_S)
                if not may_again():
                    raise

    def note_progress(self, phase: str, done: int, total: int) -> None:
        """How far the download is."""
        self.progress = Progress(phase=phase, done=done, total=total)
        self._remaining.note(done, total)

    def note_arriving(self, folder: Path) -> None:
        """An engine can be started with the files in `folder`, of which the weights are still downloaded."""
        self._arriving = folder
        self._may_start.set()

    @property
    def is_arriving(self) -> bool:
        """Whether the engine has requests, and its weights are still downloaded."""
        return self.state == "READY" and self.progress is not None

    @property
    def is_withdrawn(self) -> bool:
        """Whether the engine gets no more requests, because its download is slow: it still has others."""
        return self.state == "DOWNLOADING" and self._was_ready

    def _set(self, state: ModelState) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        try:
            await self._serve()
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

    async def _serve(self) -> None:
        """Raises the reason of the end, when nothing of this placement is left."""
        download = asyncio.ensure_future(self._bring(self))
        download.add_done_callback(self._brought)
        try:
            await self._may_start.wait()
            while True:
                await self._one_start(self.entry, download)
        finally:
            download.cancel()
            await _finished(self._released(download))

    async def _released(self, download: Download) -> None:
        await asyncio.wait([download])
        await ENGINES.run(self._release)

    def _brought(self, download: Download) -> None:
        if not download.cancelled():
            download.exception()  # `_one_start` or `_while_arriving` raises it, unless the placement ends first
        if self._was_ready:
            self.progress = None
        self._may_start.set()

    async def _ready(self, engine: Engine, download: Download) -> None:
        """Wait until the engine may get requests. Raises `EngineDied`."""
        await engine.ready()
        ended = asyncio.ensure_future(engine.ended())
        either: list[asyncio.Future[Any]] = [download, ended]
        try:
            while not download.done() and self._remaining.seconds() > ADMIT_S:
                await asyncio.wait(either, timeout=ADMIT_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    raise ended.result()
        finally:
            ended.cancel()

    async def _watched(self, engine: Engine, download: Download) -> EngineDied:
        """The end of an engine that was ready: while its weights arrive, it is READY if the rest is expected soon."""
        ended = asyncio.ensure_future(engine.ended())
        either: list[asyncio.Future[Any]] = [download, ended]
        try:
            while not (download.done() or ended.done()):
                left_s = self._remaining.seconds()
                if self.state == "READY" and left_s > WITHDRAW_S:
                    self._set("DOWNLOADING")
                    log.warning("a model gets no requests: its download is slow", extra={"model": self.model_id})
                elif self.state != "READY" and left_s <= ADMIT_S:
                    self._set("READY")
                await asyncio.wait(either, timeout=ADMIT_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            if self.state != "READY" and not ended.done() and not _has_failed(download):
                self._set("READY")
            return await ended
        finally:
            ended.cancel()

    async def _one_start(self, entry: Source, download: Download) -> None:
        """Start an engine, and return when it may be started again. Raises `StarlingError` to give up."""
        if download.done():
            download.result()
            arriving, self.progress = None, Progress(phase="load")
            self._set("LOADING_TO_GPU")
        else:
            arriving = self._arriving
            self._set("DOWNLOADING")
        await self._check_files()
        begun = ready_at = self._clock()
        engine = self._make_engine(entry, arriving)
        engine.adapters = tuple(self.adapters.values())
        self._in_engine = {one.name for one in engine.adapters}
        was_ready = False
        try:
            try:
                await engine.start()
                self.engine = engine
                await _while_arriving(download, self._ready(engine, download))
                is_suspended = not self._is_open()
                if is_suspended:
                    await engine.suspend()
                if download.done():
                    download.result()
                    self.progress = None
                was_ready, ready_at = True, self._clock()
                self._was_ready = True
                self._proven = {one.digest for one in engine.adapters}
                self.serving = {one.name: one.digest for one in engine.adapters if self.adapters.get(one.name) == one}
                self.load_s = ready_at - begun
                self.incarnation = self._next_incarnation()
                self._set("READY")
                if is_suspended:
                    async with self._switching:  # a lease that ends meanwhile suspends it afterwards
                        if self._is_open():  # since the question
                            await self._resume(engine)
                log.info("model is ready", extra={"model": self.model_id, "url": engine.url, "s": self.load_s})
                raise await _while_arriving(download, self._watched(engine, download))
            finally:
                self._was_ready = False
                self.serving, self._in_engine = {}, set()
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
                if error.is_final and not was_ready and self._leave_out(engine, error.message):
                    return  # the model starts once more, without it
                raise
            self.restarts += 1
            await self._sleep(delay)


def _has_failed(download: Download) -> bool:
    return download.cancelled() or download.exception() is not None


async def _while_arriving(download: Download, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises the error of the download if that fails first, or has failed."""
    task = asyncio.ensure_future(work)
    try:
        if not download.done():
            either: list[asyncio.Future[Any]] = [task, download]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if download.done():  # it may have failed before, while nothing looked at it
            download.result()
        return await task
    finally:
        task.cancel()
        await _finished(asyncio.wait([task]))
        if not task.cancelled():
            task.exception()  # that of the download was raised


async def _finished(work: Awaitable[object]) -> None:
    """Wait for the end of `work`, cancelled or not: afterwards the task may be cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
