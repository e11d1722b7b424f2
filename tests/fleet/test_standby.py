"""Standby engines: as many wait as are configured, each becomes one engine, and none outlives its agent."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline import procfs
from pipeline.config.load import resolve
from pipeline.config.schema import EngineConfig
from pipeline.errors import ResourceError
from pipeline.fleet.standby import MARK_VARIABLE, WAITING
from pipeline.runtime.code_stamp import PACKAGES, code_stamp
from stages.agent.engines.local_model import LocalModel
from stages.agent.engines.standby import AMPLE, SCARCE, Standby, StandbyEngine
from stages.agent.models import Models
from stages.agent.state_file import Stored
from tests.fleet.coordination_stores import until

PROGRAM = f"""
import os, sys
print("begun", flush=True)
if not os.path.exists("slow"):
    print("{WAITING}", flush=True)
print("got " + sys.stdin.readline() + os.environ["{MARK_VARIABLE}"], flush=True)
sys.stdin.read()
"""


class Host:
    """What a pool asks of the host."""

    def __init__(self) -> None:
        self.free = 1.0
        self.code = "release 1"


@asynccontextmanager
async def standby(count: int, folder: Path, host: Host | None = None, **options: Any) -> AsyncIterator[Standby]:
    """Standby engines of a small program; its pauses are short."""
    host = host or Host()
    pool = Standby(
        count,
        (sys.executable, "-c", PROGRAM),
        os.environ,
        folder,
        **{
            "refill_s": 0.0,
            "check_s": 0.01,
            "free": lambda: host.free,
            "code": lambda: host.code,
            **options,
        },
    )
    pool.keep()
    try:
        yield pool
    finally:
        await pool.stop()


async def claimed(pool: Standby) -> StandbyEngine:
    found = await pool.claim()
    assert found is not None
    return found


async def test_one_becomes_an_engine_and_is_replaced_when_that_answers(tmp_path: Path) -> None:
    async with standby(2, tmp_path) as pool:
        await until(lambda: pool.waiting == 2)
        pool.begin_start()
        pool.begin_start()
        one, other = await claimed(pool), await claimed(pool)
        assert await pool.claim() is None
        assert one.mark != other.mark
        one.child.send(b"a home\n")
        await until(lambda: one.mark in one.child.lines)
        assert "got a home" in one.child.lines
        pool.end_start(was_standby=True, is_ready=True)
        await asyncio.sleep(0.1)
        assert pool.engines == ()  # the other engine starts still
        pool.end_start(was_standby=True, is_ready=True)
        await until(lambda: pool.waiting == 2)
        assert one not in pool.engines
        await asyncio.gather(one.child.stop(0.0), other.child.stop(0.0))


async def test_those_that_have_imported_everything_come_first(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    async with standby(1, tmp_path) as pool:
        await until(lambda: [one for one in pool.engines if "begun" in one.child.lines] != [])
        assert pool.waiting == 0
        slow = await claimed(pool)  # an engine that gets it is still sooner there than one that starts by itself
        await slow.child.stop(0.0)


async def test_a_dead_one_is_no_engine_and_is_replaced(tmp_path: Path) -> None:
    async with standby(1, tmp_path, refill_s=0.01) as pool:
        await until(lambda: pool.waiting == 1)
        dead = pool.engines[0]
        pool.begin_start()  # none is started now
        await dead.child.stop(0.0)
        assert await pool.claim() is None
        assert pool.waiting == 0
        pool.end_start(was_standby=False, is_ready=True)
        await until(lambda: pool.waiting == 1)
        assert pool.engines[0] is not dead


async def test_the_pause_grows_when_each_one_dies(tmp_path: Path) -> None:
    now = [0.0]
    async with standby(1, tmp_path, refill_s=1.0, clock=lambda: now[0]) as pool:
        for pause_s in (2.0, 4.0):  # they had not imported everything
            (tmp_path / "slow").touch()
            await until(lambda: len(pool.engines) == 1)
            await pool.engines[0].child.stop(0.0)
            await until(lambda: not pool.engines)
            now[0] += pause_s - 0.5
            await asyncio.sleep(0.1)
            assert not pool.engines
            now[0] += 0.5


async def test_after_one_that_failed_an_engine_starts_without(tmp_path: Path) -> None:
    async with standby(1, tmp_path) as pool:
        await until(lambda: pool.waiting == 1)
        pool.begin_start()
        failed = await claimed(pool)
        await failed.child.stop(0.0)
        pool.end_start(was_standby=True, is_ready=False)
        await until(lambda: pool.waiting == 1)
        for was_ready in (None, False):
            pool.begin_start()
            assert await pool.claim() is None
            pool.end_start(was_standby=False, is_ready=was_ready)
        pool.begin_start()
        pool.end_start(was_standby=False, is_ready=True)
        await (await claimed(pool)).child.stop(0.0)


async def test_one_of_an_older_release_is_not_used(tmp_path: Path) -> None:
    host = Host()
    async with standby(1, tmp_path, host) as pool:
        await until(lambda: pool.waiting == 1)
        old = pool.engines[0]
        for code in ("", "release 2"):  # "": an upgrade is under way
            host.code = code
            pool.begin_start()
            assert await pool.claim() is None
            pool.end_start(was_standby=False, is_ready=True)
        await until(lambda: pool.waiting == 1 and pool.engines[0] is not old)
        assert not old.child.is_running
        new = await claimed(pool)
        assert new.code == "release 2"
        await new.child.stop(0.0)


async def test_they_end_when_the_host_is_short_of_memory(tmp_path: Path) -> None:
    host = Host()
    async with standby(1, tmp_path, host) as pool:
        await until(lambda: pool.waiting == 1)
        one = pool.engines[0]
        host.free = 0.9 * SCARCE
        await until(lambda: not one.child.is_running)
        host.free = 0.9 * AMPLE  # none is started, to be ended again soon
        await asyncio.sleep(0.1)
        assert pool.engines == ()
        host.free = AMPLE
        await until(lambda: pool.waiting == 1)


async def test_all_end_with_the_agent_and_none_is_started_again(tmp_path: Path) -> None:
    async with standby(2, tmp_path) as pool:
        await until(lambda: pool.waiting == 2)
        begun = pool.engines
    assert not [one for one in begun if one.child.is_running]
    pool.keep()
    await asyncio.sleep(0.05)
    assert pool.engines == ()


async def test_none_outlives_a_stop_while_it_is_started(tmp_path: Path) -> None:
    for steps in range(12):
        async with standby(2, tmp_path) as pool:
            for _ in range(steps):
                await asyncio.sleep(0)
        assert pool.engines == ()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    async with standby(0, tmp_path) as pool:
        pool.begin_start()
        assert await pool.claim() is None
        pool.end_start(was_standby=False, is_ready=True)
        await asyncio.sleep(0.05)
        assert pool.engines == ()


async def test_a_program_that_cannot_be_run_is_not_tried_without_end(tmp_path: Path) -> None:
    asked: list[None] = []
    pool = Standby(
        1,
        ("/nothing",),
        os.environ,
        tmp_path,
        refill_s=0.0,
        check_s=0.01,
        free=lambda: 1.0,
        code=lambda: str(asked.append(None)),
    )
    pool.keep()
    await until(lambda: len(asked) > 0)
    await asyncio.sleep(0.1)
    assert len(asked) == 1
    assert pool.engines == ()
    await pool.stop()


async def test_a_model_that_does_not_fit_without_them_either_does_not_put_them_off(tmp_path: Path) -> None:
    host, now = Host(), [0.0]
    host.free = 0.0
    async with standby(1, tmp_path, host, clock=lambda: now[0]) as pool:
        assert not await pool.give_up("m needs the memory", 600.0)
        host.free = 1.0
        await until(lambda: pool.waiting == 1)
        pool.begin_start()
        assert await pool.give_up("m needs the memory", 600.0)
        pool.end_start(was_standby=False, is_ready=True)
        assert not await pool.give_up("n needs the memory", 600.0)
        now[0] = 600.0
        await until(lambda: pool.waiting == 1)


async def test_they_end_when_a_model_would_not_fit_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none: Any = None
    stored = Stored(agent_id="a", incarnation="b")
    models = Models(resolve({}, {}), tmp_path, tmp_path / "models", stored, [], none, none, lambda: True)
    source = LocalModel("m", "d", 1, EngineConfig(model="m", engine="vllm", path="/m", memory_mb=1))
    async with standby(1, tmp_path) as pool:
        models.standby = pool
        await until(lambda: pool.waiting == 1)
        pool.begin_start()  # no other one is started
        monkeypatch.setattr(procfs, "available_memory", lambda: 1 << 20)
        await models.make_memory(source)
        assert pool.waiting == 1
        monkeypatch.setattr(procfs, "available_memory", lambda: 0 if pool.engines else 1 << 20)
        await models.make_memory(source)
        assert pool.engines == ()
        pool.end_start(was_standby=False, is_ready=None)  # while the model is downloaded no engine starts
        await asyncio.sleep(0.1)
        assert pool.engines == ()
        pool.begin_start()
        monkeypatch.setattr(procfs, "available_memory", lambda: 0)
        with pytest.raises(ResourceError, match="unload a model"):
            await models.make_memory(source)


def test_the_stamp_of_the_code_changes_with_each_file(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package / "part").mkdir(parents=True)
    file = tmp_path / PACKAGES[-1] / "part" / "module.py"
    file.write_text("a = 1")
    first = code_stamp(tmp_path)
    assert first == code_stamp(tmp_path)
    (tmp_path / "new").write_text("a = 2")
    os.utime(tmp_path / "new", ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    (tmp_path / "new").replace(file)  # of the same size and time
    second = code_stamp(tmp_path)
    assert second not in ("", first)
    (tmp_path / PACKAGES[0] / "added.py").touch()
    assert code_stamp(tmp_path) not in ("", first, second)
    (tmp_path / PACKAGES[0]).rename(tmp_path / "away")
    assert code_stamp(tmp_path) == ""
