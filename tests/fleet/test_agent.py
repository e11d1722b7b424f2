"""An agent loads published models, answers through their engines, and passes on what it is killed with."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.config.schema import ModelConfig
from pipeline.coordination.interface import Item
from pipeline.coordination.sqlite_store import SqliteStore
from pipeline.fleet import records
from pipeline.fleet.bodies import LoadModelRequest, Progress
from pipeline.fleet.token import for_metrics
from pipeline.procfs import children, command
from shm.pages import NUMERICS
from stages.agent.engines.fence import processes_of
from stages.agent.http_api import SESSION_MB, AgentApi
from tests.e2e.conftest import share_caches
from tests.e2e.server import POLL_S, START_S, poll_until
from tests.fleet.agent_process import Agent, post, publish_tiny

SETTINGS: dict[str, Any] = {"cache": {"max_size_mb": 32}, "server": {"max_body_mb": 1}}
CHAT = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "hello there"}], "temperature": 0}


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blobs")
    publish_tiny(tmp_path_factory.mktemp("published"), folder)
    return folder


def settings(blobs: Path, **agent: Any) -> dict[str, Any]:
    # A lease that outlasts any pause of a busy machine: with a shorter one an agent refuses what it is asked for.
    return {**SETTINGS, "fleet": {"blobs": str(blobs), "agent": {"lease_ms": 600_000, **agent}}}


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory, blobs: Path) -> Iterator[Agent]:
    """An agent that loads nothing."""
    with Agent(tmp_path_factory.mktemp("idle"), settings(blobs, id="idle-1", max_models=1)) as agent:
        yield agent


def answer_of(model: dict[str, Any]) -> Any:
    """What the model answers at its endpoint."""
    status, answer = post(model["inference_endpoint_url"], CHAT, model["engine_key"])
    assert status == 200, answer
    return answer["choices"]


def registered(home: Path) -> list[Item]:
    async def scan() -> list[Item]:
        async with SqliteStore(home / "fleet.db") as store:
            return (await store.scan(records.AGENTS))[0]

    return asyncio.run(scan())


@pytest.mark.slow
def test_a_model_outlives_its_engine_and_its_agent(tmp_path: Path, blobs: Path) -> None:
    share_caches(tmp_path)
    engines = tmp_path / "agent" / "engines"
    with Agent(tmp_path, settings(blobs)) as agent:
        assert agent.process is not None
        status, loaded = agent.call("/load_model", model_id="tiny")
        assert status == 200, loaded
        assert (loaded["status"], loaded["cache_state"]) == ("success", "READY")
        first = answer_of(loaded)
        assert first[0]["message"]["content"]
        poll_until(lambda: agent.model("tiny")["progress"] is None)  # a disk may give its file its place later

        # The same load again, and the same request through the agent, change nothing.
        assert agent.call("/load", model_id="tiny") == (status, {**loaded, "progress": None})
        status, passed_on = agent.call("/infer", **CHAT)
        assert (status, passed_on["choices"]) == (200, first)
        assert post(loaded["inference_endpoint_url"], CHAT, "")[0] == 401
        (home,) = engines.iterdir()
        model = agent.model("tiny")
        assert (model["cache_level"], model["numerics"], model["kv_type"]) == ("CPU_RESIDENT", NUMERICS, "f16")
        assert model["page_tokens"] == ModelConfig(name="any").page_tokens

        # The engine is killed: another one answers with the same bytes.
        (up,) = [pid for pid in children(agent.process.pid) if "up" in command(pid)]
        os.kill(up, signal.SIGKILL)
        agent.wait_for("an engine has ended")
        agent.wait_for("model is ready")
        again = agent.model("tiny")
        assert (again["cache_state"], again["restarts"]) == ("READY", 1)
        assert again["engine_incarnation"] != model["engine_incarnation"]
        assert answer_of(again) == first

        # The agent is killed: its successor registers when the engine is dead, and loads the model again.
        _, before = agent.call("/heartbeat")
        left = processes_of(home)
        assert left
        agent.process.kill()
        agent.process.wait()
        agent.start().wait_ready()
        assert not set(left) & set(processes_of(home))
        agent.wait_for("model is ready")
        _, after = agent.call("/heartbeat")
        assert after["agent_id"] == before["agent_id"]
        assert after["incarnation"] != before["incarnation"]
        assert answer_of(agent.model("tiny")) == first

        # Unloaded, nothing of it is left but its files; then they go, too.
        while (answer := agent.call("/unload_model", model_id="tiny", only_idle=True))[0] == 409:
            time.sleep(POLL_S)  # its metrics are up to a second old
        status, unloaded = answer
        assert (status, unloaded["cache_state"]) == (200, "UNLOADED")
        assert unloaded["cache_level"] in ("NVME_CACHED", "DRAM_CACHED")
        assert processes_of(home) == []
        assert agent.call("/infer", **CHAT)[0] == 404
        assert agent.call("/unload_model", model_id="tiny", drop_cached=True)[1]["cache_level"] == "REMOTE"
        assert not list((tmp_path / "models").glob("*.bin"))

        # Loaded and ended in order.
        assert agent.call("/load_model", model_id="tiny", wait=False)[0] in (200, 202)
        assert len(registered(tmp_path)) == 1
        assert agent.stop(signal.SIGTERM) == 0
    assert processes_of(home) == []
    assert registered(tmp_path) == []


def test_an_agent_registers_and_reports(idle: Agent) -> None:
    (item,) = registered(idle.home)
    record = records.decode(item.key, item.value)
    assert (record.agent_id, record.url) == ("idle-1", idle.url)
    status, report = idle.call("/heartbeat", orchestrator_id="o1", extend_lease=True)
    assert status == 200
    assert report["incarnation"] == record.incarnation
    assert (report["state"], report["loaded_models"]) == ("IDLE", [])
    assert 0 < report["lease_s"] <= 600
    assert report["memory_free"] > 0
    assert report["disk_free"] > 0


def test_only_health_answers_without_the_token(idle: Agent) -> None:
    for path in ("/load_model", "/load", "/unload_model", "/heartbeat", "/infer"):
        for key in ("", "x" * 40):
            status, answer = post(idle.url + path, {}, key)
            assert (status, answer["error"]["code"]) == (401, "INVALID_API_KEY")
    connection = http.client.HTTPConnection("127.0.0.1", int(idle.url.rpartition(":")[2]), timeout=60)
    for path, expected in (("/health", 200), ("/metrics", 401)):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == expected
        response.read()
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {idle.token}"})
    text = connection.getresponse().read().decode()
    assert "starling_agent_degraded 0.0" in text
    scraper = {"Authorization": f"Bearer {for_metrics(idle.token)}"}
    for method, path, status in (("GET", "/metrics", 200), ("POST", "/heartbeat", 401), ("GET", "/pieces/a/b", 401)):
        connection.request(method, path, headers=scraper)
        response = connection.getresponse()
        assert response.status == status, path
        response.read()
    connection.close()


@pytest.mark.parametrize(("path", "body", "status", "reason"), [
    ("/load_model", {"model_id": "nothing"}, 404, "published models: tiny"),
    ("/load_model", {"model_id": "../etc"}, 400, "expected up to 128 letters"),
    ("/load_model", {"model_id": "tiny", "digest": "0" * 64}, 409, "ask for the published one"),
    ("/load_model", {"model_id": "tiny", "wait": "no"}, 400, "wait: Expected `bool`"),
    ("/load_model", {}, 400, "model_id"),
    ("/unload_model", {"model_id": "tiny", "force": True}, 400, "force"),
    ("/infer", CHAT, 404, "loaded models: none"),
    ("/infer", {"model": "tiny", "path": "/v1/admin/drain"}, 400, "path: Invalid enum value"),
    ("/nowhere", {}, 404, "an agent has /load_model"),
    ("/heartbeat", b"{", 400, "not valid JSON"),
    ("/infer", b'{"model": "' + b"x" * (2 << 20), 413, "larger than 1 MiB"),
])  # fmt: skip
def test_a_refusal_gives_the_reason(idle: Agent, path: str, body: Any, status: int, reason: str) -> None:
    found, answer = post(idle.url + path, body, idle.token)
    assert found == status, answer
    assert reason in answer["error"]["message"]


def test_a_refusal_names_the_field_of_the_call(idle: Agent) -> None:
    for path in ("/load_model", "/load"):
        _, answer = idle.call(path, model_id="nothing")
        assert answer["error"]["param"] == "model_id", answer


def test_a_session_that_is_too_large_is_refused_with_its_own_bound(idle: Agent) -> None:
    status, answer = post(idle.url + "/take_session", b'{"record": "' + b"x" * (SESSION_MB << 20), idle.token)
    assert status == 413
    assert f"larger than {SESSION_MB} MiB" in answer["error"]["message"], answer
    assert "server.max_body_mb" not in answer["error"]["message"], answer


@pytest.mark.parametrize(("field", "reason"), [(b"A: " + b"x" * 9000, "8190 bytes"), (b"no colon", "not valid HTTP")])
def test_malformed_http_is_refused_as_others_and_not_quoted(idle: Agent, field: bytes, reason: str) -> None:
    n_lines = len(idle.output)
    with socket.create_connection(("127.0.0.1", int(idle.url.rpartition(":")[2])), timeout=START_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-secret\r\n%b\r\n\r\n" % field)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        body = answer.read()
    assert (answer.status, answer.headers["Content-Type"]) == (400, "application/json")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "INVALID_REQUEST")
    assert reason in error["message"] and b"secret" not in body
    idle.wait_output("a client sent malformed HTTP", "127.0.0.1", since=n_lines)
    assert "secret" not in "".join(idle.output)


def test_an_unknown_expectation_is_refused_as_others(idle: Agent) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(idle.url.rpartition(":")[2]), timeout=START_S)
    connection.request("GET", "/health", headers={"Expect": "foo"})
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    assert (answer.status, error["code"]) == (417, "INVALID_REQUEST")
    assert error["message"].startswith("the header Expect is 'foo', expected '100-continue'; ")


def test_unloading_what_is_not_loaded_succeeds(idle: Agent) -> None:
    status, answer = idle.call("/unload_model", model_id="tiny")
    assert (status, answer["cache_state"], answer["cache_level"]) == (200, "UNLOADED", "REMOTE")


def test_pieces_need_the_token_and_a_known_file(idle: Agent) -> None:
    for key, expected in (("", 401), ("x" * 40, 401), (idle.token, 404)):
        connection = http.client.HTTPConnection(idle.url.removeprefix("http://"), timeout=60)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", f"/pieces/{'d' * 64}/{'c' * 32}/0", headers=headers)
        assert connection.getresponse().status == expected
        connection.close()


@pytest.mark.slow
def test_an_agent_gets_a_model_from_another_one(tmp_path: Path, blobs: Path) -> None:
    stored = shutil.copytree(blobs, tmp_path / "blobs")
    homes = [tmp_path / name for name in ("a", "b")]
    for home in homes:
        home.mkdir()
        share_caches(home)
        (home / "fleet-token").write_text("t" * 40 + "\n")
        (home / "fleet-token").chmod(0o600)
    plain = settings(stored)
    plain["fleet"]["store"] = f"sqlite:{tmp_path / 'fleet.db'}"
    with Agent(homes[0], plain) as first:
        status, loaded = first.call("/load_model", model_id="tiny")
        assert status == 200, loaded
        for part in stored.glob("models/*/*.bin"):
            part.unlink()
        with Agent(homes[1], plain) as second:
            status, again = second.call("/load_model", model_id="tiny")
            assert status == 200, again
            assert answer_of(again) == answer_of(loaded)


async def test_the_answer_to_a_load_of_an_adapter_has_the_progress_of_its_model() -> None:
    placement = SimpleNamespace(state="DOWNLOADING", progress=Progress(phase="download", done=1, total=4))
    loading: Any = SimpleNamespace(task=asyncio.Future(), placement=placement, is_ready=False)

    async def load(asked: LoadModelRequest) -> Any:
        return loading

    api: Any = object.__new__(AgentApi)
    api._models = SimpleNamespace(adapters=SimpleNamespace(load=load))
    answer = await api._load_adapter(None, LoadModelRequest(model_id="tiny:a", wait=False))
    shown = msgspec.json.decode(answer.body)
    assert (answer.status, shown["cache_state"]) == (202, "DOWNLOADING")
    assert shown["progress"] == {"phase": "download", "done": 1, "total": 4}
    loading.placement = None  # its own file is fetched first
    answer = await api._load_adapter(None, LoadModelRequest(model_id="tiny:a", wait=False))
    assert msgspec.json.decode(answer.body)["progress"] is None


def test_a_second_agent_of_the_same_directory_is_refused(idle: Agent) -> None:
    command = [sys.executable, "-m", "starling", "agent", "--port", "0"]
    second = subprocess.run(command, env=idle.environment, capture_output=True, text=True, timeout=300, check=False)
    assert second.returncode == 78
    assert "stage agent already runs there" in second.stderr
