"""Records of agents have their version and key; a wrong body gets an error that names the field."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.coordination.address import open_store
from pipeline.coordination.etcd_store import EtcdStore
from pipeline.coordination.redis_store import RedisStore
from pipeline.coordination.sqlite_store import SqliteStore
from pipeline.errors import ConfigError, InvalidRequest
from pipeline.fleet import bodies, records

JSON = "application/json"


def record(**changes: object) -> records.AgentRecord:
    plain = {"agent_id": "host-1", "url": "http://127.0.0.1:8090", "incarnation": "a1", **changes}
    return msgspec.convert(plain, records.AgentRecord)


def test_a_record_is_read_back_under_its_own_key_only() -> None:
    one = record()
    assert records.decode("agents/host-1", records.encode(one)) == one
    with pytest.raises(ConfigError, match="is the record of 'host-1'"):
        records.decode("agents/host-2", records.encode(one))
    with pytest.raises(ConfigError, match="has version 2, expected 1"):
        records.decode("agents/host-1", records.encode(record(version=2)))
    for damaged in (b"", b"[]", b"{}", b'{"agent_id": 1}', b"\xff"):
        with pytest.raises(ConfigError, match="is not a record of an agent"):
            records.decode("agents/host-1", damaged)


@pytest.mark.parametrize("agent_id", ["", "a/b", "-a", "a" * 64, "a b", "ä", "a\n"])
def test_an_id_that_cannot_be_a_key_is_refused(agent_id: str) -> None:
    assert records.check_agent_id(agent_id)


@pytest.mark.parametrize(("settings", "url"), [
    ({}, "http://127.0.0.1:8090"),
    ({"host": "::1", "port": 1}, "http://[::1]:1"),
    ({"host": "0.0.0.0", "advertise": "node-1"}, "http://node-1:8090"),
])  # fmt: skip
def test_the_url_names_the_advertised_host(settings: dict[str, object], url: str) -> None:
    config = resolve({"fleet": {"agent": settings}}, {})
    assert records.agent_url(config.fleet.agent) == url


def test_the_port_that_was_given_replaces_0() -> None:
    config = resolve({"fleet": {"agent": {"port": 0}}}, {})
    assert records.agent_url(config.fleet.agent, 4711) == "http://127.0.0.1:4711"


def test_a_request_is_decoded_with_its_defaults() -> None:
    request = bodies.decode_request(bodies.LoadModelRequest, b'{"model_id": "m"}', JSON)
    assert (request.model_id, request.wait, request.timeout_ms) == ("m", True, 600_000)
    assert bodies.decode_request(bodies.HeartbeatRequest, b"", "") == bodies.HeartbeatRequest()


def test_a_request_has_no_field_that_an_older_agent_refuses() -> None:
    load = bodies.LoadModelRequest(model_id="m", digest="0" * 64, timeout_ms=1)
    assert set(msgspec.json.decode(msgspec.json.encode(load))) == {"model_id", "digest", "timeout_ms"}
    assert msgspec.json.encode(bodies.HeartbeatRequest()) == b"{}"
    assert msgspec.json.encode(bodies.HeartbeatRequest(extend_lease=True)) == b'{"extend_lease":true}'


@pytest.mark.parametrize(("body", "field", "reason"), [
    (b"{}", "model_id", "missing required field"),
    (b'{"model_id": ""}', "model_id", "length >= 1"),
    (b'{"model_id": "m", "wait": 1}', "wait", "Expected `bool`"),
    (b'{"model_id": "m", "timeout_ms": -1}', "timeout_ms", ">= 0"),
    (b'{"model_id": "m", "digest": "xyz"}', "digest", "matching regex"),
    (b'{"model_id": "m", "colour": 1}', "colour", "unknown field"),
])  # fmt: skip
def test_a_wrong_body_names_the_field(body: bytes, field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        bodies.decode_request(bodies.LoadModelRequest, body, JSON)
    assert caught.value.param == field


def test_a_wrong_choice_names_the_others() -> None:
    body = b'{"model": "m", "path": "/v1/models"}'
    with pytest.raises(InvalidRequest, match="'/v1/models'; expected one of /v1/chat/completions, /v1/completions, "):
        bodies.decode_request(bodies.InferRequest, body, JSON)


@pytest.mark.parametrize("body", [b"[]", b"{", b"null", b'{"model_id": "a", "model_id": "b"}', b"\xff"])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        bodies.decode_request(bodies.LoadModelRequest, body, JSON)


def test_states_have_their_names_on_the_wire() -> None:
    answer = bodies.LoadModelResponse(status="success", model_id="m", model_state="READY", inference_endpoint_url="u")
    plain = msgspec.json.decode(msgspec.json.encode(answer))
    assert plain["status"] == "success"
    assert plain["cache_state"] == "READY"
    assert plain["inference_endpoint_url"] == "u"
    assert msgspec.convert(plain, bodies.LoadModelResponse) == answer


async def test_the_address_of_the_store_names_its_kind(tmp_path: Path) -> None:
    env = {"STARLING_HOME": str(tmp_path)}
    async with open_store(resolve({}, env), env) as store:
        assert isinstance(store, SqliteStore)
        assert store.path == tmp_path / "fleet.db"
    async with open_store(resolve({"fleet": {"store": f"sqlite:{tmp_path}/x/f.db"}}, env), env) as store:
        assert isinstance(store, SqliteStore)
        assert store.path == tmp_path / "x" / "f.db"


async def test_etcd_is_reached_by_host_and_port() -> None:
    pytest.importorskip("aetcd")
    async with open_store(resolve({"fleet": {"store": "etcd://127.0.0.1:2379/mine"}}, {})) as store:
        assert isinstance(store, EtcdStore)
        assert store.address == "127.0.0.1:2379"


async def test_etcd_is_reached_by_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would take the port for a part of an address without brackets."""
    aetcd: Any = ModuleType("aetcd")
    aetcd.rpc = None  # no connection is made
    monkeypatch.setitem(sys.modules, "aetcd", aetcd)
    async with open_store(resolve({"fleet": {"store": "etcd://[fd00::2]:2379"}}, {})) as store:
        assert isinstance(store, EtcdStore)
        assert store.address == "[fd00::2]:2379"


async def test_redis_is_reached_by_host_and_port() -> None:
    pytest.importorskip("redis")
    async with open_store(resolve({"fleet": {"store": "redis://127.0.0.1:6379/mine"}}, {})) as store:
        assert isinstance(store, RedisStore)
        assert store.address == "127.0.0.1:6379"


@pytest.mark.parametrize(("key", "settings"), [
    ("fleet.store", {"store": "redis://x"}),
    ("fleet.store", {"store": "redis://:secret@host:1"}),
    ("fleet.store", {"store": "rediss://host:1"}),
    ("fleet.store", {"store": "sqlite:"}),
    ("fleet.store", {"store": "etcd://host"}),
    ("fleet.store", {"store": "etcd://host:99999"}),
    ("fleet.store", {"store": "etcd://user:secret@host:1"}),
    ("fleet.store", {"store": "etcd://host:1/a/b"}),
    ("fleet.agent.host", {"agent": {"host": ""}}),
    ("fleet.agent.host", {"agent": {"host": "0.0.0.0"}}),
    ("fleet.agent.advertise", {"agent": {"advertise": "http://x"}}),
])  # fmt: skip
def test_an_address_that_cannot_be_used_is_refused(key: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"fleet": settings}, {})
    assert caught.value.param == key
