"""A server whose stages are connected over TCP: the same bytes, and nothing for a process without the key file."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq

from pipeline.config.schema import DEMO_MODEL
from pipeline.ipc import edge_keys
from pipeline.protocol import messages as m
from pipeline.protocol.topology import EDGES
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server
from tools.ports import free_port

pytestmark = pytest.mark.slow

REQUEST = {"prompt": "The lighthouse keeper climbed the stairs and", "max_tokens": 24, "seed": 5, "temperature": 0.8}


@pytest.fixture(scope="module")
def tcp_server(tmp_path_factory: pytest.TempPathFactory, demo_gguf: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("tcp")
    share_caches(home, models=True)
    edges = {edge: f"tcp://127.0.0.1:{free_port()}" for edge in EDGES}
    with Server(home, {"models": [{"name": DEMO_MODEL, "kv_cache_mb": 64}], "edges": edges}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


def choices(server: Server) -> Any:
    return server.post("/v1/generate", **REQUEST)["choices"]


def test_stages_over_tcp_answer_with_the_same_bytes(demo_server: Server, tcp_server: Server) -> None:
    assert choices(tcp_server) == choices(demo_server)
    assert not any((tcp_server.home / "run" / f"{edge}.sock").exists() for edge in EDGES)
    path = tcp_server.home / "state" / edge_keys.FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not (demo_server.home / "state" / edge_keys.FILE_NAME).exists()


@pytest.mark.parametrize("edge", ["gateway-scheduler", "gateway-tokenizer", "gateway-kv"])
@pytest.mark.parametrize("has_keys", [False, True])
def test_a_stranger_cannot_reach_a_stage(tcp_server: Server, edge: str, has_keys: bool) -> None:
    """It takes the gateway's name with a later epoch, which would replace the gateway, and submits a request."""
    binder = EDGES[edge].binder

    def refused(found: dict[str, float]) -> float:
        """By the stage of that edge, which may not have published the metric yet."""
        labels = f'edge="{edge}"', f'stage="{binder}"'
        return sum(value for key, value in found.items() if all(label in key for label in labels))

    before = refused(tcp_server.metrics("starling_connections_refused_total"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        if has_keys:
            stranger = edge_keys.generate()
            raw.setsockopt(zmq.CURVE_SERVERKEY, stranger.binder.public.encode())
            raw.setsockopt(zmq.CURVE_PUBLICKEY, stranger.connector.public.encode())
            raw.setsockopt(zmq.CURVE_SECRETKEY, stranger.connector.secret.encode())
        raw.connect(_address(tcp_server, edge))
        raw.send(m.encode(m.Hello("gateway", 1 << 62, 1, 1)))
        tcp_server.wait_metrics("starling_connections_refused_total", lambda found: refused(found) > before)
        assert not raw.poll(0)
    assert choices(tcp_server)
    tcp_server.wait_output("connection refused", edge)


def test_a_killed_stage_returns_to_its_edges(tcp_server: Server) -> None:
    expected = choices(tcp_server)
    for stage in ("scheduler", "kv"):
        os.kill(tcp_server.pid_of(stage), signal.SIGKILL)
        assert choices(tcp_server) == expected


def _address(server: Server, edge: str) -> str:
    return str(yaml.safe_load(server.config_path.read_text())["edges"][edge])
