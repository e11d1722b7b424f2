"""A gateway whose models are loaded on demand, without sockets: stages, memory and the clock are simulated.

Its service, catalog and loader are real.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.api.keys import Caller
from pipeline.api.requests import generate
from pipeline.config.load import resolve
from pipeline.errors import StarlingError
from pipeline.models.capacity import FreeMemory
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.gateway.requests.readers import FanOutSink
from stages.gateway.requests.state import RequestState
from stages.gateway.service import Service

NAMES = ("a", "b", "c")
NEED = (16 + 64) << 20  # bytes of arenas that a model takes: its pages, and what is assumed for one not prepared
FILE = b"GGUF and so on"
WEIGHTS = len(FILE)
TURNS = 10_000  # of the event loop, until something must have happened
ANN, BOB = Caller("ann"), Caller("bob")


class Gateway:
    """Its models are configured, `a` is loaded at the start, and `room` models fit."""

    def __init__(
        self,
        home: Path,
        room: int = 2,
        a: dict[str, Any] | None = None,
        performance: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        **on_demand: Any,
    ) -> None:
        path = home / "model.gguf"
        path.write_bytes(FILE)
        models = [{"name": n, "path": str(path), "kv_cache_mb": 16, "preload": n == "a"} for n in NAMES]
        models[0] |= a or {}
        directories = {"run_dir": str(home / "run"), "state_dir": str(home / "state")}
        server = {**directories, **(server or {})}
        given = {"models": models, "server": server, "on_demand": on_demand, "performance": performance or {}}
        self.config = resolve(given, {})
        self.now = 100.0
        self.room = room
        self.beside = 0  # bytes of memory more than that
        self.submitted: dict[str, str] = {}  # version by sequence
        self.service = Service(
            self.config,
            self._to_scheduler,
            lambda frame: True,
            clock=lambda: self.now,
            wall=lambda: 1e9 + self.now,
            measure=lambda config: self._free(),
        )
        self.catalog, self.loader = self.service.catalog, self.service.loader
        for stage in ("tokenizer", "scheduler"):
            getattr(self.service, f"on_{stage}_up")(m.Hello(stage, 1, 1, 1))
        self.report()

    def _free(self) -> FreeMemory:
        free = (self.room - len(self.catalog.all)) * NEED
        return FreeMemory(free, free + len(NAMES) * WEIGHTS + self.beside)

    def _to_scheduler(self, frame: m.Frame) -> bool:
        if isinstance(frame, m.Submit):
            self.submitted[frame.sequence] = frame.model
        return True

    def report(self, *, is_ready: bool = True) -> None:
        """The stages report every version: described, and with a worker if `is_ready`."""
        for one in self.catalog.all:
            ends = array("I", range(1, 10)).tobytes()
            described = m.Described("", one.id, "aa" * 32, 9, 4096, (), True, pieces=b"abcdefghi", piece_ends=ends)
            self.service.loaded.on_description(one.id, described)
        self.state(is_ready)

    def state(self, is_ready: bool) -> None:
        states = [m.ModelState(one.id, "aa" * 32, is_ready, "", 0, 0, 8) for one in self.catalog.all]
        self.service.on_scheduler(m.SchedulerState(states))
        beat = m.Heartbeat("x", 1, int(self.now * 10), False, True)
        self.service.readiness.tokenizer.observe(beat)
        self.service.readiness.scheduler.observe(beat)

    def tick(self) -> None:
        self.service.tick(None, None)
        self.loader.tick()

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(TURNS):
            if condition():
                return
            self.tick()
            await asyncio.sleep(0.001)
        raise AssertionError("it did not come")

    def ask(self, model: str, caller: Caller = ANN, **body: Any) -> asyncio.Task[RequestState]:
        generation = generate.read({"prompt": [1, 2, 3], "max_tokens": 4, "model": model, **body})
        return asyncio.get_running_loop().create_task(self.service.admission.admit(generation, caller, self.now))

    async def start(self, model: str, caller: Caller = ANN, **body: Any) -> RequestState:
        """A request that has been submitted. Its model is loaded at once."""
        task = self.ask(model, caller, **body)
        await self.until(lambda: task.done() or self.loading(model))
        self.report()
        request = await task
        await self.until(lambda: self.catalog.serving(model))
        request.sink = FanOutSink()
        await self.service.lifecycle.start(request)
        return request

    def end(self, request: RequestState) -> None:
        version = request.spec.version
        (name,) = [sequence.id for sequence in request.sequences]
        self.service.on_scheduler(m.Tokens(version, 1, [m.SequenceTokens(name, 0, (7,), finish="length")]))

    async def use(self, model: str, caller: Caller = ANN, **body: Any) -> None:
        """A request from beginning to end."""
        self.end(await self.start(model, caller, **body))

    def loading(self, model: str) -> list[ModelVersion]:
        return self.catalog.loading(model)

    @property
    def loaded(self) -> set[str]:
        return {one.name for one in self.catalog.all if one.state == "serving"}

    async def close(self) -> None:
        for task in [change.task for change in self.loader._changes.values() if change.task]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def with_gateway(home: Path, test: Callable[[Gateway], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        gateway = Gateway(home, **options)
        await test(gateway)
        await gateway.close()

    asyncio.run(run())


async def refused(task: Awaitable[Any], code: str = "MODEL_UNAVAILABLE") -> StarlingError:
    with pytest.raises(StarlingError) as error:
        await task
    assert error.value.code == code, error.value
    return error.value
