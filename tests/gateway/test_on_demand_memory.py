"""Memory of models that are loaded on demand: which models go, which stay, and what their unloading frees."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ResourceError
from pipeline.models import weight_copies
from pipeline.models.capacity import FreeMemory, MemoryPlan, check_plan
from tests.gateway.on_demand import ANN, BOB, NAMES, NEED, WEIGHTS, Gateway, refused, with_gateway


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


def test_a_pinned_model_stays_whatever_requests_say(tmp_path: Path) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.use("a", keep_alive=0)
        gateway.now += 1e6
        gateway.tick()
        await gateway.use("b")
        await gateway.use("c")
        assert gateway.loaded == {"a", "c"}

    with_gateway(tmp_path, test, a={"pinned": True})


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
