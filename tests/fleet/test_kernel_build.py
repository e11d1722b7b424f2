"""The kernels of an agent's host are compiled before its first model is asked for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.procfs import children, command
from stages.agent.engines.kernel_build import KernelBuild
from stages.tokenizer.kernels.compiled import directory
from stages.worker.kernels import features
from stages.worker.kernels.build import build
from tests.e2e.conftest import copy_cache, share_caches
from tests.e2e.server import START_S
from tests.fleet.agent_process import Agent, publish_tiny

WAITS = "print('compile kernels 1 of 3', flush=True); import time; time.sleep(600)"
COUNTS = "print('compile kernels 3 of 3', flush=True)"
FAILS = "import sys; sys.exit('no compiler')"


def made(tmp_path: Path, program: str, is_loading: Any = lambda: False, **options: Any) -> KernelBuild:
    """One whose process runs `program`."""
    return KernelBuild(
        ["f16"],
        dict(os.environ),
        tmp_path,
        is_loading,
        command=(sys.executable, "-c", program),
        check_s=0.01,
        **options,
    )


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_it_runs_once_and_reports_its_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        build = made(tmp_path, WAITS)
        running = asyncio.create_task(build.run())
        await until(lambda: build.progress is not None and build.progress.total)
        assert (build.progress.done, build.progress.total) == (1, 3)  # type: ignore[union-attr]
        await build.stop()
        async with asyncio.timeout(60):
            await running
        assert build.progress is None
        await made(tmp_path, COUNTS).run()

    caplog.set_level("INFO")
    asyncio.run(run())
    assert [one.message for one in caplog.records if "kernels" in one.message] == ["the kernels are compiled"]


def test_an_engine_that_starts_ends_it_and_it_goes_on_afterwards(tmp_path: Path) -> None:
    async def run() -> None:
        loading = False
        build = made(tmp_path, WAITS, lambda: loading)
        running = asyncio.create_task(build.run())
        await until(lambda: build.progress is not None and build.progress.total)
        loading = True
        await build.interrupt()
        await until(lambda: build.progress is None)
        for _ in range(10):
            await asyncio.sleep(0)
            assert build.progress is None
        loading = False
        await until(lambda: build.progress is not None and build.progress.total)
        await build.stop()
        await running

    asyncio.run(run())


@pytest.mark.parametrize(
    ("program", "build_s", "reason"), [(FAILS, 60.0, "no compiler"), (WAITS, 0.2, "did not end in 0 s")]
)
def test_engines_compile_if_it_fails_or_takes_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, program: str, build_s: float, reason: str
) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await made(tmp_path, program, build_s=build_s).run()

    asyncio.run(run())
    (warned,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert reason in warned.reason  # type: ignore[attr-defined]


def compiled(home: Path) -> dict[str, int]:
    """The stored object files, and when they were written."""
    return {str(path.relative_to(home)): path.stat().st_mtime_ns for path in (home / "cache").glob("*/*.o")}


def copy_kernels(cache: Path) -> set[str]:
    """Copy the tests' own kernels into a cache, but for two entries; the names of their files."""
    build("f16")
    for folder in (features.cache_dir(), directory()):
        copy_cache(folder, cache / folder.name)
    left_out = [cache / features.cache_dir().name / f"{name}-any.o" for name in ("embed", "head")]
    for path in left_out:
        path.unlink()
        path.with_suffix(".symbol").unlink()
    return {str(path.relative_to(cache.parent)) for path in left_out}


@pytest.mark.slow
def test_an_idle_agent_compiles(tmp_path: Path) -> None:
    home = tmp_path
    (tmp_path / "publisher").mkdir()
    share_caches(tmp_path / "publisher")
    publish_tiny(tmp_path, tmp_path / "blobs")
    models = [{"name": "tiny", "path": "catalog:tiny", "kv_cache_mb": 16}]
    # A lease that outlasts any pause of a busy machine: with a shorter one an agent refuses what it is asked for.
    fleet = {"blobs": str(tmp_path / "blobs"), "agent": {"lease_ms": 600_000}}
    settings: dict[str, Any] = {"models": models, "fleet": fleet}
    with Agent(home, settings, {"STARLING_FLEET__AGENT__COMPILE_KERNELS": "true"}) as agent:
        assert agent.process is not None

        def compiler() -> int:
            return next((pid for pid in children(agent.process.pid) if "--kernels" in command(pid)), 0)  # type: ignore[union-attr]

        end = time.monotonic() + START_S
        while not (agent.call("/heartbeat")[1].get("compiling") or {}).get("total"):
            assert time.monotonic() < end, agent.output
        assert os.getpriority(os.PRIO_PROCESS, compiler()) == 19
        # Killed with its agent.
        killed = compiler()
        os.kill(agent.process.pid, signal.SIGKILL)
        agent.process.wait()
        while "--kernels" in command(killed):
            assert time.monotonic() < end
        # The next agent goes on with what is missing: two that compile quickly, because a busy machine leaves little
        # time to a process of the lowest priority.
        missing = copy_kernels(home / "cache")
        agent.start().wait_ready()
        agent.wait_for("the kernels are compiled", 10 * START_S)
        assert missing <= set(compiled(home))
        before = compiled(home)
        assert {Path(name).name for name in before} > {"steps-any.o", "matmul-any.o", "attend-f16.o"}
        assert agent.call("/heartbeat")[1]["compiling"] is None
        status, loaded = agent.call("/load_model", model_id="tiny")
        assert status == 200, loaded
        assert compiled(home) == before
