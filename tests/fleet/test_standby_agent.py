"""An agent's standby engine: what it holds, which engine it becomes, and that a killed agent leaves nothing of it."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.fleet.standby import MARK_FILE, MARK_VARIABLE
from pipeline.procfs import children, command
from stages.agent.engines.standby import AMPLE, free_memory
from tests.e2e.conftest import share_caches
from tests.e2e.server import START_S
from tests.fleet.agent_process import Agent, post, publish_tiny

KV_MB = {"tiny": 16, "other": 48}


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + START_S
    while not (found := condition()):
        if time.monotonic() >= end:
            skip_without_memory(AMPLE)
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def skip_without_memory(part: float) -> None:
    """An agent keeps no standby engine then. Other work on the machine may take the memory at any time."""
    if (free := free_memory()) < part:
        pytest.skip(f"an agent keeps no standby engine: {free:.0%} of the memory is available")


def waiting(agent: Agent) -> int:
    """Pid of the standby engine that has imported everything and has no home; 0: there is none."""
    assert agent.process is not None
    if not n_waiting(agent):
        return 0
    below = [pid for pid in children(agent.process.pid) if "--standby" in command(pid)]
    return next((pid for pid in below if environment(pid).get(MARK_VARIABLE, "") not in ["", *marks(agent.home)]), 0)


def n_waiting(agent: Agent) -> int:
    """As its metrics say."""
    request = urllib.request.Request(agent.url + "/metrics", headers={"Authorization": f"Bearer {agent.token}"})
    text = urllib.request.urlopen(request, timeout=START_S).read().decode()
    return int(float(re.findall(r"^starling_agent_standby_engines (\S+)$", text, re.MULTILINE)[0]))


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def environment(pid: int) -> dict[str, str]:
    try:
        parts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(part.decode("utf-8", "replace").partition("=")[::2] for part in parts if part)


def marked(mark: str) -> list[int]:
    """Living processes with that mark."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if environment(pid).get(MARK_VARIABLE) == mark]


def kv_bytes(model: dict[str, Any]) -> float:
    """Of the arena that the engine of a model has made."""
    url = model["inference_endpoint_url"].split("/v1/")[0] + "/metrics"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {model['engine_key']}"})
    text = urllib.request.urlopen(request, timeout=30).read().decode()
    found = re.findall(r'^starling_arena_bytes\{.*arena="kv".*state="reserved".*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.slow
def test_a_standby_engine_becomes_one_engine_and_outlives_no_agent(tmp_path: Path) -> None:
    skip_without_memory(2 * AMPLE)
    share_caches(tmp_path)
    for seed, name in enumerate(KV_MB):
        publish_tiny(tmp_path, tmp_path / "blobs", name, seed)
    settings: dict[str, Any] = {
        "models": [{"name": name, "path": f"catalog:{name}", "kv_cache_mb": mb} for name, mb in KV_MB.items()],
        "auth": {"api_keys": [{"key": "secret-of-this-configuration", "tenant": "t"}]},
        "fleet": {"blobs": str(tmp_path / "blobs"), "agent": {"lease_ms": 600_000}},
    }
    own = {"STARLING_FLEET__AGENT__STANDBY_ENGINES": "1", "REDIS_PASSWORD": "secret-of-the-agent"}
    with Agent(tmp_path, settings, environment=own) as agent:
        # While it waits it has no file, no socket, no setting and no secret.
        pid = until(lambda: waiting(agent))
        assert oom_score(pid) == 1000
        kept = environment(pid)
        assert not [name for name in kept if "__" in name and name.startswith("STARLING_")]
        assert not [value for value in kept.values() if "secret" in value]
        opened = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        assert {one.partition(":")[0] for one in opened} == {"pipe"}

        # An agent that is killed takes it along.
        mark = kept[MARK_VARIABLE]
        kill(agent)
        until(lambda: not marked(mark))
        agent.start().wait_ready()

        # It becomes the engine of the model that is asked for, with the settings of that model, and another waits.
        for name in reversed(KV_MB):
            pid = until(lambda: waiting(agent))
            mark = environment(pid)[MARK_VARIABLE]
            status, loaded = agent.call("/load_model", model_id=name)
            assert status == 200, loaded
            assert agent.process is not None
            assert oom_score(pid) == oom_score(agent.process.pid)
            assert len(marked(mark)) > 5
            nbytes = until(partial(kv_bytes, loaded))  # metrics are up to a second old
            assert 0.9 < nbytes / (KV_MB[name] << 20) < 1.1
        first = answer(loaded)

        # One that dies while its engine starts: the next one starts without.
        assert agent.call("/unload_model", model_id="tiny")[0] == 200
        pid = until(lambda: waiting(agent))
        os.kill(pid, signal.SIGSTOP)  # it does not read what it becomes
        assert agent.call("/load_model", model_id="tiny", wait=False)[0] == 202
        mark = environment(pid)[MARK_VARIABLE]
        until(lambda: mark in marks(tmp_path))
        os.kill(pid, signal.SIGKILL)
        agent.wait_for("an engine has ended")
        agent.wait_for("model is ready")
        assert answer(agent.model("tiny")) == first
        until(lambda: not marked(mark))

        # The agent is killed when one has become an engine: its successor finds nothing of it.
        assert agent.call("/unload_model", model_id="tiny")[0] == 200
        pid = until(lambda: waiting(agent))
        mark = environment(pid)[MARK_VARIABLE]
        assert agent.call("/load_model", model_id="tiny", wait=False)[0] == 202
        until(lambda: mark in marks(tmp_path))
        kill(agent)
        agent.start().wait_ready()
        assert not marked(mark)
        agent.wait_for("model is ready")
        agent.wait_for("model is ready")
        assert answer(agent.model("tiny")) == first
        marks_left = {environment(one).get(MARK_VARIABLE) for one in agent.pids()} - {None}
        assert agent.stop(signal.SIGTERM) == 0
    assert not [one for left in marks_left for one in marked(left or "")]


def kill(agent: Agent) -> None:
    assert agent.process is not None
    agent.process.kill()
    agent.process.wait()


def marks(home: Path) -> list[str]:
    """Of the processes that have got homes."""
    return [path.read_text() for path in (home / "agent" / "engines").glob(f"*/{MARK_FILE}")]


def answer(model: dict[str, Any]) -> Any:
    body = {"model": model["model_id"], "prompt": "hello", "max_tokens": 8, "temperature": 0}
    url = model["inference_endpoint_url"].split("/v1/")[0] + "/v1/completions"
    status, found = post(url, body, model["engine_key"])
    assert status == 200, found
    return found["choices"]
