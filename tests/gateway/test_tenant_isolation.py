"""Cached pages and answers of one tenant are invisible to another, unless sharing is configured."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config import paths
from pipeline.observe.metrics import Metrics
from tests.gateway.peers import MODEL
from tests.gateway.server import MakeServer, Server

BODY = {"prompt": "x", "max_tokens": 3, "seed": 7}


def caches(server: Server, *keys: str) -> list[str]:
    """Send the same request with each key; return the cache header of each answer."""
    found = []
    for key in keys:
        answer = server.post("/v1/generate", BODY, {"Authorization": f"Bearer {key}"} if key else {})
        assert answer.status == 200
        found.append(answer.headers["X-Starling-Cache"])
    return found


def salts(server: Server) -> list[str]:
    return [frame.cache_salt for frame in server.peers.do(lambda: list(server.peers.generator.submitted))]


def make(make_server: MakeServer, keys: list[dict[str, Any]], **sections: Any) -> Server:
    server = make_server(auth={"api_keys": keys}, cache={"responses": {"enabled": True}}, **sections)
    server.wait_ready()
    return server


def test_tenants_are_isolated_by_default(make_server: MakeServer) -> None:
    keys = [{"key": "sk-a", "tenant": "a"}, {"key": "sk-a2", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}]
    server = make(make_server, keys)
    assert caches(server, "sk-a", "sk-b", "sk-a2", "sk-b") == ["miss", "miss", "hit", "hit"]
    assert salts(server) == ["\x01a\0", "\x01b\0"]


@pytest.mark.parametrize("how", [{"share_cache": True}, {"cache_salt": "team"}])
def test_keys_can_share(make_server: MakeServer, how: dict[str, Any]) -> None:
    keys = [{"key": "sk-a", "tenant": "a", **how}, {"key": "sk-b", "tenant": "b", **how}, {"key": "sk-c"}]
    server = make(make_server, keys)
    assert caches(server, "sk-a", "sk-b", "sk-c") == ["miss", "hit", "miss"]


def test_a_model_can_be_shared(make_server: MakeServer) -> None:
    models = [{"name": MODEL, "path": "/none.gguf", "share_cache": True}]
    server = make(make_server, [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}], models=models)
    assert caches(server, "sk-a", "sk-b") == ["miss", "hit"]


def test_without_keys_the_salt_is_the_requests_own(make_server: MakeServer) -> None:
    server = make(make_server, [])
    assert caches(server, "", "") == ["miss", "hit"]
    assert salts(server) == [""]


def test_metrics_name_tenants_to_administrators_only(make_server: MakeServer) -> None:
    server = make(make_server, [{"key": "sk-a", "tenant": "a"}, {"key": "sk-o", "tenant": "o", "admin": True}])
    metrics = Metrics("scheduler", paths.arena_dir(server.config))
    metrics.add("starling_tenant_tokens_total", "a", amount=5.0)
    metrics.write()
    for headers, tenant in (
        ({}, "all"),
        ({"Authorization": "Bearer sk-a"}, "all"),
        ({"Authorization": "Bearer sk-o"}, "a"),
    ):
        text = server.get("/metrics", headers).body.decode()
        assert f'starling_tenant_tokens_total{{tenant="{tenant}"}} 5.0' in text
        assert ('tenant="a"' in text) == (tenant == "a")
    assert server.get("/metrics", {"Authorization": "Bearer wrong"}).status == 401
