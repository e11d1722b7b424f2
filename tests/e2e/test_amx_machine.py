"""A server on an emulated machine with AMX: the compiled tile instructions run in its ranks, with the bytes of VNNI.

The model is small: a tile instruction takes microseconds, and a worker whose step takes seconds is killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import amx_machine
from tests.e2e.comparison import comparable
from tests.e2e.conftest import share_caches
from tests.e2e.server import PlainServer
from tools.tiny_gguf import SHAPES, write_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not amx_machine.is_possible(), reason="needs AVX-512 VNNI, no AMX")]

# The formats of the model: in a batch of 16, products of the second one read activations that are packed for the first.
FORMATS = "Q4_K:16,Q6_K:33"
# Two whole tiles and 3 tokens that go through dot products; then a batch that is one tile.
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [5 + i % 90 for i in range(35)], "max_tokens": 2, "temperature": 0.0, "logprobs": 2},
    {"prompt": [9], "max_tokens": 2, "n": 16, "seed": 3, "temperature": 1.1, "logprobs": 1},
]


def answers(home: Path, environment: dict[str, str], machine: amx_machine.Machine | None = None) -> list[Any]:
    """The answers of a server of two ranks; on a machine, both have executed tile instructions, and rightly."""
    home.mkdir()
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["super"], "Q4_K_M", seed=1)
    model = {"name": "tiny", "path": str(path), "kv_cache_mb": 8, "ranks": 2}
    with PlainServer(home, {"models": [model]}, environment) as server:
        found = [comparable(list(server.stream("/v1/generate", ignore_eos=True, **body))) for body in REQUESTS]
        if machine is not None:
            ranks = {server.pid_of("worker-tiny"), server.pid_of("worker-tiny/1")}
            threads = machine.threads()
            assert {thread.process for thread in threads} == {thread.thread for thread in threads} == ranks
            for thread in threads:
                counts = thread.instructions
                assert thread.reason == ""
                assert counts["tdpbsud"] == counts["tilezero"] == counts["tilestored"] > 1000
                assert counts["tileloadd"] == 2 * counts["tdpbsud"]
                assert counts["ldtilecfg"] == counts["tilerelease"]
    return found


@pytest.mark.timeout(1500)  # kernels may have to be compiled for this machine
def test_a_server_with_amx_gives_the_bytes_of_vnni(tmp_path: Path) -> None:
    if reason := amx_machine.refusal():
        pytest.skip(reason)
    with amx_machine.machine() as machine:
        environment = machine.environment | {"STARLING_AMX_FORMATS": FORMATS}
        by_tiles = answers(tmp_path / "amx", environment, machine)
    assert by_tiles == answers(tmp_path / "vnni", {"STARLING_ISA": "vnni"})
