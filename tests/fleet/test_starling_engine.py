"""The engine `starling` by itself: a standby engine becomes it, answers, is suspended and resumed, leaves nothing."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import aiohttp
import pytest

from pipeline.config.load import resolve
from pipeline.config.schema import ModelConfig
from stages.agent.engines.fence import processes_of
from stages.agent.engines.interface import Queue
from stages.agent.engines.starling_engine import StarlingEngine, engine_run_dir, make_standby
from stages.agent.stage import free_port
from starling.cli.stage import STAGES
from tests.e2e.conftest import share_caches
from tests.e2e.server import ROOT, START_S
from tests.fleet.agent_process import post, publish_tiny
from tests.fleet.coordination_stores import until

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    """The directory with the checkpoint of a model."""
    publish_tiny(tmp_path, tmp_path / "blobs")
    return tmp_path / "publisher" / "models"


@pytest.mark.slow
async def test_a_suspended_engine_refuses_and_a_resumed_one_gives_the_same_answer(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How soon it must have refused is that of leases, which there are none of here.
    monkeypatch.setattr("stages.agent.engines.starling_engine.SUSPEND_S", START_S)
    (index,) = models_dir.glob("*.idx")
    home = tmp_path / "own" / "engine-1"
    share_caches(tmp_path)
    env = {**os.environ, "STARLING_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    config = resolve({"cache": {"max_size_mb": 32}}, {})
    model = ModelConfig(name="tiny")
    async with aiohttp.ClientSession() as session:
        monkeypatch.setattr("stages.agent.engines.standby.free_memory", lambda: 1.0)
        standby = make_standby(1, tmp_path, env, refill_s=0.0)
        engine = StarlingEngine(
            config, model, index.stem, home, models_dir, session, lambda: free_port("127.0.0.1"), env, standby
        )

        async def ask() -> tuple[int, object]:
            status, answer = await asyncio.to_thread(post, f"{engine.url}/v1/completions", BODY, engine.key)
            return status, answer["choices"] if status == 200 else answer["error"]["code"]

        async def phases() -> set[str]:
            """Of the load of its model."""
            headers = {"Authorization": f"Bearer {engine.key}"}
            async with session.get(engine.url + config.metrics.endpoint, headers=headers) as answer:
                text = await answer.text()
            return set(re.findall(r'starling_model_load_seconds\{.*phase="([^"]*)"', text))

        try:
            standby.keep()
            await until(lambda: standby.waiting == 1, START_S)
            (waiting,) = standby.engines
            await engine.start()
            await engine.ready()
            # The process that waited is the engine, and is found by its home.
            assert standby.engines == ()
            assert waiting.child.is_running
            assert len(processes_of(home)) > len(STAGES)
            # A request waits for it: there are no dummy passes.
            async with asyncio.timeout(START_S):
                while not (found := await phases()):  # metrics are up to a second old
                    await asyncio.sleep(0.05)
            assert "open" in found
            assert "warm up" not in found
            first = await ask()
            assert first[0] == 200
            queue = await engine.queue()
            assert isinstance(queue, Queue)
            await engine.suspend()
            assert await ask() == (503, "DRAINING")
            await engine.resume()
            assert await ask() == first
        finally:
            await engine.stop()
            await standby.stop()
        assert not waiting.child.is_running
        assert processes_of(home) == []
        assert not list(engine_run_dir(home, env).glob("*.sock"))
        ended = await engine.ended()
        assert not ended.is_final
