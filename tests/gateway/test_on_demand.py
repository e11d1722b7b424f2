"""Requests for models that are not loaded: one load for all, bounds on who waits, which models go and which stay.

The gateway's service, catalog and loader are real, without sockets; stages, memory and the clock are simulated.

Length: every test uses the same simulated stages and memory.
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
from pipeline.config import paths
from pipeline.config.load import resolve
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ConfigError, ResourceError, StarlingError
from pipeline.models import weight_copies
from pipeline.models.capacity import FreeMemory, MemoryPlan, check_plan
from pipeline.models.store import damaged
from pipeline.models.versions import ModelVersion, write_failure
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
        **on_demand: Any,
    ) -> None:
        path = home / "model.gguf"
        path.write_bytes(FILE)
        models = [{"name": n, "path": str(path), "kv_cache_mb": 16, "preload": n == "a"} for n in NAMES]
        models[0] |= a or {}
        server = {"run_dir": str(home / "run"), "state_dir": str(home / "state")}
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


def test_requests_share_one_load_and_are_submitted_before_it_is_complete(tmp_path: Path) -> None:
    """As soon as the vocabulary is known they are in the journal; the scheduler queues them."""

    async def test(gateway: Gateway) -> None:
        asked = [gateway.ask("b", caller) for caller in (ANN, BOB, ANN)]
        await gateway.until(lambda: gateway.loading("b"))
        assert gateway.service.on_demand.waiting.held == 3
        gateway.report(is_ready=False)
        requests = [await task for task in asked]
        (version,) = gateway.loading("b")
        assert {request.spec.version for request in requests} == {version.id}
        for request in requests:
            request.sink = FanOutSink()
            await gateway.service.lifecycle.start(request)
        assert set(gateway.submitted.values()) == {version.id}
        assert gateway.loading("b") == [version]
        gateway.report()
        await gateway.until(lambda: gateway.catalog.serving("b"))
        assert gateway.service.on_demand.waiting.held == 0

    with_gateway(tmp_path, test)


def test_a_turn_of_a_session_waits_until_its_model_serves(tmp_path: Path) -> None:
    """The KV manager has no session of a version that is being loaded."""

    async def test(gateway: Gateway) -> None:
        task, other = gateway.ask("b", session_id=""), gateway.ask("b")
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report(is_ready=False)
        assert (await other).spec.version == gateway.loading("b")[0].id
        assert gateway.service.on_demand.waiting.held == 1
        assert not task.done()
        gateway.report()
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 0)
        assert gateway.catalog.serving("b")
        task.cancel()  # there is no KV manager here

    with_gateway(tmp_path, test)


def test_who_waits_is_bounded_in_all_and_for_each_tenant(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        tasks = [gateway.ask("b", ANN), gateway.ask("b", ANN)]
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 2)
        error = await refused(gateway.ask("c", ANN))
        assert error.headers() == {"Retry-After": "5"}
        assert "2 of them yours" in error.message
        tasks.append(gateway.ask("c", BOB))
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 3)
        await refused(gateway.ask("b", Caller("cid")))
        assert await gateway.ask("a", ANN)  # a loaded model is not concerned
        tasks[0].cancel()
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 2)
        for task in tasks[1:]:
            task.cancel()

    with_gateway(tmp_path, test, max_waiting=3, max_waiting_per_tenant=2)


def test_a_request_waits_up_to_a_limit_and_a_stream_as_long_as_it_has_time(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        whole, stream = gateway.ask("b"), gateway.ask("b", stream=True)
        await gateway.until(lambda: gateway.service.on_demand.waiting.held == 2)
        gateway.now += 31.0
        gateway.service.readiness.notify()
        error = await refused(whole)
        assert error.headers() == {"Retry-After": "5"}
        assert "was not loaded within 30 s" in error.message
        assert not stream.done()
        gateway.report()
        assert (await stream).spec.model == "b"

    with_gateway(tmp_path, test, wait_ms=30_000)


def test_the_least_recently_used_idle_model_makes_room(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.use("b")
        gateway.now += 1.0
        await gateway.use("a")
        gateway.now += 1.0
        await gateway.use("c")
        assert gateway.loaded == {"a", "c"}
        gateway.now += 1.0
        await gateway.use("b")
        assert gateway.loaded == {"b", "c"}

    with_gateway(tmp_path, test)


def test_a_model_with_requests_stays_and_a_load_waits_for_it(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        first = await gateway.start("a")
        second = await gateway.start("b")
        task = gateway.ask("c", stream=True)
        await gateway.until(lambda: "has requests" in gateway.service.on_demand.progress("c"))
        assert gateway.loaded == {"a", "b"}
        gateway.end(second)
        await gateway.until(lambda: gateway.loading("c"))
        gateway.report()
        assert await task
        assert gateway.catalog.serving("a")
        gateway.end(first)

    with_gateway(tmp_path, test)


def test_an_unload_frees_the_copies_of_the_weights(tmp_path: Path) -> None:
    """The pages of the file that they were copied from can be dropped already."""

    async def test(gateway: Gateway) -> None:
        settings, eviction = gateway.config.models[1], gateway.loader._eviction
        (version,) = gateway.catalog.all
        gateway.room = 1
        gateway.beside = -NEED
        with pytest.raises(ResourceError, match="bytes available beside the weights of the loaded models"):
            eviction._check(settings, {version.id})
        run_dir = paths.run_dir(gateway.config)
        run_dir.mkdir(parents=True, exist_ok=True)
        weight_copies.record(run_dir, version.stage, NEED, is_made=True)
        eviction._check(settings, {version.id})
        with pytest.raises(ResourceError):
            eviction._check(settings, set())
        gateway.room, gateway.beside = 2, -2 * WEIGHTS
        eviction._check(settings, set())
        weight_copies.remove(run_dir, version.stage)
        with pytest.raises(ResourceError):
            eviction._check(settings, set())

    with_gateway(tmp_path, test)


def test_a_load_fails_when_each_worker_group_has_failed(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        run_dir = paths.run_dir(gateway.config)
        run_dir.mkdir(parents=True, exist_ok=True)
        task = gateway.ask("b")
        await gateway.until(lambda: gateway.loading("b"))
        (version,) = gateway.loading("b")
        error = ConfigError("no such file")
        write_failure(run_dir, version.stage, error)
        for _ in range(20):
            gateway.tick()
            await asyncio.sleep(0.01)
        assert gateway.loading("b"), "the second group may make it ready"
        write_failure(run_dir, version.of_group(1).stage, error)
        await refused(task)
        assert not gateway.loading("b")

    with_gateway(tmp_path, test, performance={"worker_groups": 2})


@pytest.mark.parametrize("groups", [1, 2])
def test_an_unload_frees_the_weights_or_their_copies_of_each_worker_group(tmp_path: Path, groups: int) -> None:
    """Without `use_mmap` a group reads the weights; what it has read is freed when it has copies."""

    async def test(gateway: Gateway) -> None:
        settings, eviction = gateway.config.models[1], gateway.loader._eviction
        (version,) = gateway.catalog.all
        gateway.room = 1
        run_dir = paths.run_dir(gateway.config)
        run_dir.mkdir(parents=True, exist_ok=True)

        def check_freed(nbytes: int) -> None:
            """The unload of a frees just so many bytes beside its arenas, which are as large as those of b."""
            gateway.beside = (groups - len(NAMES)) * WEIGHTS - nbytes
            eviction._check(settings, {version.id})
            gateway.beside -= 1
            with pytest.raises(ResourceError):
                eviction._check(settings, {version.id})

        check_freed(groups * WEIGHTS)
        stages = [version.of_group(number).stage for number in range(groups)]
        for done, stage in enumerate(stages, 1):
            weight_copies.record(run_dir, stage, NEED, is_made=True)
            check_freed((groups - done) * WEIGHTS + done * NEED)

    with_gateway(tmp_path, test, performance={"use_mmap": False, "worker_groups": groups})


def test_a_model_that_stays_in_use_is_not_waited_for_without_end(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        busy = [await gateway.start("a"), await gateway.start("b")]
        task = gateway.ask("c", stream=True)
        await gateway.until(lambda: "has requests" in gateway.service.on_demand.progress("c"))
        gateway.now += 61.0
        assert "beside models that have requests" in (await refused(task)).message
        assert gateway.loaded == {"a", "b"}
        for request in busy:
            gateway.end(request)

    with_gateway(tmp_path, test)


def test_a_model_that_is_retiring_with_requests_delays_no_load_that_fits_without_another(tmp_path: Path) -> None:
    """Its requests may take hours, and all changes of models wait for that load."""

    async def test(gateway: Gateway) -> None:
        await gateway.use("b")
        running = await gateway.start("a")
        gateway.catalog.retire("a", "change", 1e10)
        await gateway.use("c")
        assert gateway.loaded == {"c"}
        assert [one.name for one in gateway.catalog.retiring()] == ["a"]
        busy = await gateway.start("c")
        task = gateway.ask("b", stream=True)
        await gateway.until(lambda: "has requests" in gateway.service.on_demand.progress("b"))
        gateway.now += 61.0
        assert "beside models that have requests" in (await refused(task)).message
        for request in (running, busy):
            gateway.end(request)

    with_gateway(tmp_path, test)


def test_a_version_that_retires_without_requests_is_waited_for_although_its_model_is_asked_for(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.use("b")
        reports: list[str] = []
        with gateway.service.in_flight.admitting("a"):
            gateway.catalog.retire("a", "change", 1e10)
            load = gateway.loader._eviction.make_room(gateway.config.models[2], reports.append)
            task = asyncio.get_running_loop().create_task(load)
            while not reports:
                assert gateway.catalog.serving("b"), "it was unloaded"
                await asyncio.sleep(0)
            task.cancel()
        assert reports == ["waiting for the memory of a model that is being unloaded"]

    with_gateway(tmp_path, test)


def test_a_model_that_is_unloaded_while_requests_wait_for_it_stays_unloaded(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        first, second = await gateway.start("a"), await gateway.start("b")
        task = gateway.ask("c", stream=True)
        await gateway.until(lambda: "has requests" in gateway.service.on_demand.progress("c"))
        gateway.loader.unload("c", "change", 60.0)
        await refused(task, "MODEL_NOT_FOUND")
        await gateway.until(lambda: not gateway.loader.phase("c"))
        gateway.end(second)
        gateway.tick()
        assert gateway.loaded == {"a", "b"}
        assert not gateway.loading("c")
        gateway.end(first)

    with_gateway(tmp_path, test)


def test_a_load_that_cannot_fit_is_refused_with_the_numbers_and_unloads_nothing(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        error = await refused(gateway.ask("b"), "INSUFFICIENT_RESOURCES")
        assert f"needs {NEED + WEIGHTS:,} bytes ({WEIGHTS} of weights, {16 << 20:,} of KV pages" in error.message
        assert "(none) frees no memory" in error.message
        gateway.catalog.retire_idle("a")
        gateway.room = 0
        await gateway.until(lambda: not gateway.catalog.all)
        gateway.now += 6.0
        await refused(gateway.ask("b"), "INSUFFICIENT_RESOURCES")

    with_gateway(tmp_path, test, room=1, a={"pinned": True})


def test_a_failure_is_repeated_for_seconds_without_another_attempt(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        path = tmp_path / "model.gguf"
        path.rename(tmp_path / "gone")
        error = await refused(gateway.ask("b"))
        assert str(tmp_path) not in error.message
        (tmp_path / "gone").rename(path)
        assert (await refused(gateway.ask("b"))).headers() == {"Retry-After": "5"}
        gateway.now += 6.0
        await gateway.use("b")

    with_gateway(tmp_path, test)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_requests_of_a_load_that_fails_get_no_path_of_the_server(tmp_path: Path, is_damaged: bool) -> None:
    """Neither the one that is submitted already nor a later one. No waiting helps with a file that is damaged."""
    problem = f"has SHA-256 {'1' * 64}, expected {'2' * 64}"
    reason = damaged(ModelConfig(name="b@1"), problem) if is_damaged else ConfigError(f"{tmp_path} is not a model")
    expected = ("MODEL_DAMAGED", 500, {}) if is_damaged else ("MODEL_UNAVAILABLE", 503, {"Retry-After": "5"})

    async def test(gateway: Gateway) -> None:
        task = gateway.ask("b")
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report(is_ready=False)
        request = await task
        request.sink = FanOutSink()
        await gateway.service.lifecycle.start(request)
        (version,) = gateway.loading("b")
        run_dir = paths.run_dir(gateway.config)
        run_dir.mkdir()
        write_failure(run_dir, version.stage, reason)
        await gateway.until(lambda: request.error)
        for error in (request.error, await refused(gateway.ask("b"), expected[0])):
            assert error is not None
            assert (error.code, error.status, error.headers()) == expected
            assert str(tmp_path) not in error.message
            for part in (f"model 'b': its stored file {problem}", "`starling verify b`", "another `starling pull`"):
                assert (part in error.message) == is_damaged
        assert not gateway.catalog.versions("b")

    with_gateway(tmp_path, test)


def test_an_idle_model_goes_when_the_time_of_every_tenant_is_over(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.use("b", ANN, keep_alive="1m")
        await gateway.use("b", BOB, keep_alive=0)
        gateway.tick()
        assert "b" in gateway.loaded
        gateway.now += 61.0
        running = await gateway.start("b", BOB, keep_alive=0)
        gateway.tick()
        assert "b" in gateway.loaded
        gateway.end(running)
        await gateway.until(lambda: "b" not in {one.name for one in gateway.catalog.all})
        await gateway.use("b", BOB)  # 5 minutes, the default
        gateway.now += 299.0
        gateway.tick()
        assert "b" in gateway.loaded
        gateway.now += 2.0
        gateway.tick()
        assert "b" not in gateway.loaded
        gateway.now += 1e6
        gateway.tick()
        assert gateway.loaded == {"a"}  # loaded at the start: for good

    with_gateway(tmp_path, test)


def test_what_a_request_asks_for_holds_if_it_ends_before_its_version_serves(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        task = gateway.ask("b", keep_alive=0)
        await gateway.until(lambda: gateway.loading("b"))
        gateway.report(is_ready=False)
        request = await task
        request.sink = FanOutSink()
        await gateway.service.lifecycle.start(request)
        gateway.end(request)
        gateway.report()
        await gateway.until(lambda: not gateway.loading("b"))
        gateway.tick()
        assert "b" not in gateway.loaded

    with_gateway(tmp_path, test)


def test_a_pinned_model_stays_whatever_requests_say(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.use("a", keep_alive=0)
        gateway.now += 1e6
        gateway.tick()
        await gateway.use("b")
        await gateway.use("c")
        assert gateway.loaded == {"a", "c"}

    with_gateway(tmp_path, test, a={"pinned": True})


def test_the_server_is_ready_without_any_loaded_model(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        assert not gateway.catalog.all
        assert gateway.service.readiness.report(0)["ready"]
        assert gateway.catalog.resolve("") == "a"
        await gateway.use("a")
        assert gateway.loaded == {"a"}

    with_gateway(tmp_path, test, a={"preload": False})


def test_without_models_on_demand_only_loaded_ones_are_known(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        await refused(gateway.ask("b"), "MODEL_NOT_FOUND")
        assert gateway.catalog.known_names() == ["a"]
        gateway.now += 1e6
        gateway.tick()
        assert gateway.loaded == {"a"}

    with_gateway(tmp_path, test, enabled=False)


@pytest.mark.parametrize(
    ("arenas", "memory", "mapped", "reason"),
    [
        (50, 100, 0, ""),
        (49, 1000, 0, "has 49 bytes free"),
        (1000, 99, 0, "99 bytes available"),
        (50, 130, 30, ""),
        (50, 130, 31, "99 bytes available beside the weights"),
        (50, 10, 30, "0 bytes available"),
    ],
)
def test_a_plan_counts_weights_arenas_and_the_weights_of_others(
    arenas: int, memory: int, mapped: int, reason: str
) -> None:
    plan = MemoryPlan(weights=50, kv=40, steps_and_activations=10)
    if not reason:
        check_plan(Config(), "m", plan, FreeMemory(arenas, memory), mapped)
        return
    with pytest.raises(ResourceError, match=reason) as error:
        check_plan(Config(), "m", plan, FreeMemory(arenas, memory), mapped)
    needed = "needs 100 bytes (50 of weights, 40 of KV pages, 10 of other arenas and 0 of adapters)"
    assert needed in error.value.message
