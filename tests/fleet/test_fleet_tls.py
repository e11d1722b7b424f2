"""TLS between real agents, engines and orchestrators: the roll-out, and what is refused afterwards."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml

from pipeline.coordination.sqlite_store import SqliteStore
from pipeline.fleet import records
from pipeline.fleet.peer_tls import PeerTls
from tests.e2e.conftest import share_caches
from tests.fleet.agent_process import Agent, publish_tiny
from tests.fleet.certificates import Authority
from tests.fleet.two_agents import PATIENT
from tests.gateway.http_client import Event
from tests.orchestrator.fleet import Fleet

CHAT = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "hello there"}], "temperature": 0}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def call(url: str, tls: PeerTls, agent_id: str, method: str = "POST", body: bytes = b"{}") -> tuple[int, Any]:
    """A call to an agent with a certificate; the status and the decoded body."""
    parts = urlsplit(url)
    context = tls.client_context(agent_id)
    connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=60, context=context)
    try:
        connection.request(method, parts.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read()
        is_json = "json" in response.headers.get("Content-Type", "")
        return response.status, msgspec.json.decode(raw) if is_json else raw.decode()
    finally:
        connection.close()


def record_of(home: Path) -> records.AgentRecord:
    async def scan() -> records.AgentRecord:
        async with SqliteStore(home / "fleet.db") as store:
            ((item,), _) = await store.scan(records.AGENTS)
            return records.decode(item.key, item.value)

    return asyncio.run(scan())


# ------------------------------------------------------------------ an agent without a model


@pytest.fixture(scope="module", params=["both", "required"])
def idle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[Agent]:
    tls = authority.section("agent", "one", required=request.param == "required")
    settings = {"fleet": {"tls": tls, "agent": {"lease_ms": 600_000, "id": "one"}}}
    with Agent(tmp_path_factory.mktemp("idle"), settings) as agent:
        yield agent


def test_who_may_call_an_agent(idle: Agent, authority: Authority) -> None:
    record = record_of(idle.home)
    is_required = idle.url.startswith("https://")
    assert record.url == idle.url
    assert record.tls_url.startswith("https://")
    assert (record.tls_url == record.url) is is_required
    orchestrator = authority.open("orchestrator", "o1")
    status, report = call(f"{record.tls_url}/heartbeat", orchestrator, "one")
    assert (status, report["agent_id"]) == (200, "one")
    # Other hosts of the fleet, and what only reads metrics, may not.
    for role, name in (("agent", "two"), ("agent", "one"), ("monitor", "m")):
        status, answer = call(f"{record.tls_url}/heartbeat", authority.open(role, name), "one")  # type: ignore[arg-type]
        assert (status, answer["error"]["code"]) == (403, "FORBIDDEN")
        assert f"the certificate is of {role}:{name}" in answer["error"]["message"]
    status, text = call(f"{record.tls_url}/metrics", authority.open("monitor", "m"), "one", "GET")
    assert status == 200 and "starling_agent_degraded" in text
    # Pieces are for agents alone: this one has no such file.
    piece = f"{record.tls_url}/pieces/{'d' * 64}/{'c' * 32}"
    assert call(piece, authority.open("agent", "two"), "one", "GET")[0] == 404
    assert call(piece, orchestrator, "one", "GET")[0] == 403
    # Without a certificate there is no connection.
    parts = urlsplit(record.tls_url)
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, timeout=60, context=ssl._create_unverified_context()
    )
    with pytest.raises(OSError):
        health(connection)
    # The token opens the other port while there is one.
    if is_required:
        assert not (idle.home / "fleet-token").exists()
        with pytest.raises((OSError, http.client.HTTPException)):
            plain(idle.url)
    else:
        assert plain(idle.url) == 200
        assert idle.call("/heartbeat")[0] == 200


def plain(url: str) -> int:
    return health(http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=60))


def health(connection: http.client.HTTPConnection) -> int:
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def test_an_agent_with_the_certificate_of_another_one_does_not_start(tmp_path: Path, authority: Authority) -> None:
    settings = {"fleet": {"tls": authority.section("agent", "one"), "agent": {"id": "two"}}}
    agent = Agent(tmp_path, settings)
    agent.start()
    try:
        agent.wait_for("is of agent:one, expected agent:two")
        assert agent.process is not None
        assert agent.process.wait(60) == 78
    finally:
        agent.stop()


# ------------------------------------------------------------------ the roll-out


class Rollout:
    """Two agents, and an orchestrator that is started again with other settings."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.authority = authority
        self.blobs = folder / "blobs"
        publish_tiny(folder, self.blobs)
        self.fleet = Fleet(folder / "o", self.of_orchestrator())
        self.agents: dict[str, Agent] = {}
        for name, tls in (("one", authority.section("agent", "one")), ("two", {})):
            home = folder / name
            home.mkdir()
            share_caches(home)
            (home / "fleet-token").write_text(self.fleet.secret)
            (home / "fleet-token").chmod(0o600)
            self.agents[name] = Agent(home, self.of_agent(name, tls))

    def of_agent(self, name: str, tls: dict[str, Any]) -> dict[str, Any]:
        store = f"sqlite:{self.fleet.home / 'fleet.db'}"
        agent = {"id": name, "lease_ms": 600_000}
        return {
            "cache": {"max_size_mb": 32},
            "fleet": {"store": store, "blobs": str(self.blobs), "tls": tls, "agent": agent},
        }

    def of_orchestrator(self, **tls: Any) -> dict[str, Any]:
        return {"fleet": {"orchestrator": PATIENT, "blobs": str(self.blobs), "tls": tls}}

    def restart_orchestrator(self, **tls: Any) -> None:
        self.fleet.process.terminate()
        assert self.fleet.process.wait(60) == 0
        settings = {**self.of_orchestrator(**tls), "logging": {"format": "json"}}
        (self.fleet.home / "starling.yaml").write_text(yaml.safe_dump(settings))
        self.fleet.restart()

    def restart_agent(self, name: str, tls: dict[str, Any]) -> None:
        agent = self.agents[name]
        agent.config_path.write_text(yaml.safe_dump(self.of_agent(name, tls)))
        agent.start().wait_ready()

    def wait_ready(self, name: str) -> str:
        """Wait until the orchestrator can use the agent's engine; the URL by which it reaches the agent."""
        state = self.fleet.wait(lambda state: self.is_ready(state, name))
        return str(next(one["url"] for one in state["agents"] if one["agent_id"] == name))

    @staticmethod
    def is_ready(state: dict[str, Any], name: str) -> bool:
        return any(
            one["agent_id"] == name
            and one["health"] == "READY"
            and any(model["cache_state"] == "READY" for model in one["loaded_models"])
            for one in state["agents"]
        )

    def answer(self) -> Any:
        found = self.fleet.post("/v1/chat/completions", CHAT)
        assert found.status == 200, found.body
        return found.json["choices"][0]["message"]["content"]

    def cordon(self, name: str, *, cordoned: bool) -> None:
        headers = {"Authorization": f"Bearer {self.fleet.secret}"}
        found = self.fleet.post("/v1/fleet/cordon", {"agent": name, "cordoned": cordoned, "drain": False}, headers)
        assert found.status == 200, found.body
        self.fleet.wait(
            lambda state: any(one["agent_id"] == name and one["cordoned"] is cordoned for one in state["agents"])
        )

    def close(self) -> None:
        assert self.fleet.close() == 0, "".join(self.fleet.lines)
        for agent in self.agents.values():
            agent.stop()


def text_of(event: Event) -> str:
    if event.data == "[DONE]":
        return ""
    return str(event.data["choices"][0]["delta"].get("content") or "")


@pytest.mark.slow
def test_a_fleet_is_given_tls_step_by_step(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> None:
    rollout = Rollout(tmp_path_factory.mktemp("t"), authority)
    try:
        for agent in rollout.agents.values():
            agent.start()
        for agent in rollout.agents.values():
            agent.wait_ready()
            status, answer = agent.call("/load_model", model_id="tiny")
            assert status == 200, answer
        # One agent has a certificate; the orchestrator has none, and reaches both as before.
        assert [rollout.wait_ready(name).partition(":")[0] for name in ("one", "two")] == ["http", "http"]
        first = rollout.answer()
        # The orchestrator gets its certificate: it reaches each agent as well as that can be reached.
        rollout.restart_orchestrator(**authority.section("orchestrator", "o1"))
        assert [rollout.wait_ready(name).partition(":")[0] for name in ("one", "two")] == ["https", "http"]
        assert rollout.answer() == first
        # A stream that began over TLS goes on at an agent without it, with the same bytes.
        rollout.cordon("two", cordoned=True)
        stream = rollout.fleet.stream("/v1/chat/completions", CHAT)
        events = stream.events()
        text = text_of(next(events))
        rollout.cordon("two", cordoned=False)
        one = rollout.agents["one"]
        assert one.process is not None
        one.process.kill()
        one.process.wait()
        assert text + "".join(text_of(event) for event in events) == first
        stream.close()
        # The agent comes back, and requires TLS: it needs no token, and its engine is reached through its door alone.
        (one.home / "fleet-token").unlink()
        rollout.restart_agent("one", authority.section("agent", "one", required=True))
        assert rollout.wait_ready("one").startswith("https")
        # The orchestrator requires it, too: it does not use the agent that has none.
        rollout.restart_orchestrator(**authority.section("orchestrator", "o1", required=True))
        rollout.wait_ready("one")
        state = rollout.fleet.wait(lambda state: len(state["agents"]) == 2 and state["agents"][1]["reason"])
        assert (state["agents"][1]["health"], "offers no TLS" in state["agents"][1]["reason"]) == ("UNKNOWN", True)
        assert rollout.answer() == first
        assert not (one.home / "fleet-token").exists()
    finally:
        rollout.close()
