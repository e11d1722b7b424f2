"""Bodies that are too large for an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import share_caches
from tests.fleet.agent_process import Agent
from tests.gateway import large_bodies


@pytest.mark.slow
def test_a_body_of_100_mib_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    share_caches(tmp_path)
    (tmp_path / "blobs").mkdir()
    settings: dict[str, Any] = {"server": {"max_body_mb": 1}, "fleet": {"blobs": str(tmp_path / "blobs")}}
    with Agent(tmp_path, settings) as agent:
        assert agent.process is not None
        port = urlsplit(agent.url).port or 0
        before = large_bodies.peak_bytes(agent.process.pid)
        for path in ("/infer", "/heartbeat"):
            for is_chunked in (False, True):
                answer = large_bodies.send(port, path, f"Bearer {agent.token}", is_chunked=is_chunked)
                assert answer.startswith(b"HTTP/1.1 413 ") and b"server.max_body_mb" in answer, answer
        assert large_bodies.peak_bytes(agent.process.pid) < before + (16 << 20)
        assert agent.call("/heartbeat")[0] == 200
