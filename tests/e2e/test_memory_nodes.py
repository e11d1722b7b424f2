"""A server on an emulated machine of two memory nodes, one core each, answers with the bytes of one node.

Its ranks have weights and activations of their nodes, also after a rank of the second node was killed in a stream.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline.config.schema import DEMO_MODEL
from pipeline.models.demo_models import DEMOS
from pipeline.procfs import anonymous_bytes, children
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, wait_gone
from tests.emulated_machine import memory_nodes

pytestmark = pytest.mark.slow

STREAM = {
    "model": DEMO_MODEL,
    "prompt": [5, 6, 7, 8],
    "max_tokens": 120,
    "temperature": 0.9,
    "seed": 3,
    "ignore_eos": True,
}
PROMPT = [5 + i % 900 for i in range(400)]  # records of so many tokens are copied to each node


def generate(server: Server, prompt: list[int], n: int) -> object:
    body = {"model": DEMO_MODEL, "prompt": prompt, "max_tokens": n, "temperature": 0.9, "seed": 11, "logprobs": 2}
    status, answer, _ = server.request("POST", "/v1/generate", body)
    assert status == 200, answer
    return answer["choices"]


def test_two_memory_nodes(tmp_path: Path, demo_server: Server) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a node needs a CPU")
    share_caches(tmp_path, models=True)
    expected = [generate(demo_server, prompt, n) for prompt, n in ((PROMPT, 24), (PROMPT[:3], 8))]
    streamed = [token for event in demo_server.stream("/v1/generate", **STREAM) for token in event.get("tokens", ())]
    assert len(streamed) == 120
    nodes = memory_nodes(tmp_path / "nodes", {0: str(cpus[0]), 1: ",".join(map(str, cpus[1:]))})
    model = {"name": DEMO_MODEL, "kv_cache_mb": 64, "ranks": 2, "cpus": [cpus[0], cpus[1]]}
    config = {"models": [model], "performance": {"weight_copies": "always"}}
    with Server(tmp_path, config, {"STARLING_NODES": str(nodes)}) as server:
        server.wait_output("weights are copied to each memory node")
        assert [generate(server, prompt, n) for prompt, n in ((PROMPT, 24), (PROMPT[:3], 8))] == expected
        pid = server.pid_of(f"worker-{DEMO_MODEL}")
        (rank,) = children(pid)
        nbytes = (tmp_path / "models" / f"{DEMOS[DEMO_MODEL].sha256}.bin").stat().st_size
        assert anonymous_bytes(pid) > nbytes and anonymous_bytes(rank) > 2 * nbytes, (
            "they have copies; it was forked from both"
        )
        assert ".bin" not in Path(f"/proc/{rank}/maps").read_text()
        since, tokens = len(server.output), list[int]()
        for event in server.stream("/v1/generate", **STREAM):
            tokens += event.get("tokens", ())
            if rank and len(tokens) >= 20:
                os.kill(rank, signal.SIGKILL)
                rank = 0
        assert rank == 0
        assert tokens == streamed
        assert wait_gone(pid)
        server.wait_output("weights are copied to each memory node", since=since)
        assert generate(server, PROMPT, 24) == expected[0]
        server.stop()
        assert server.leftovers() == []
