"""Long streams of a model with a window in some layers outlive the deaths of their stages, and no page is lost.

The arena has no room for all pages of one sequence, so every stream releases pages behind its window.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm.pages import attach_kv
from tests.e2e.command import starling
from tests.e2e.comparison import comparable, process
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, poll_until, wait_gone
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

SHAPE = SHAPES["gemma3"]._replace(context_length=4096)  # five of six layers have a window of 300 positions
PROMPT = [int(token) for token in np.random.default_rng(5).integers(3, 260, 2000)]
TOKENS = 200
REQUEST: dict[str, Any] = {"model": "mixed", "prompt": PROMPT, "max_tokens": TOKENS, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("mixed")
    share_caches(home)
    path: Path = write_model(home / "mixed.gguf", SHAPE, "Q4_0", seed=2)
    model = {"name": "mixed", "path": str(path), "kv_cache_mb": 3, "max_batch_size": 2}
    with Server(home, {"models": [model], "scheduler": {"max_step_tokens": 128}}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> str:
    (arena_path,) = server.arenas.rglob("*.kv")
    arena, views, geometry = attach_kv(arena_path)
    n_pages, n_groups = len(views.pages), geometry.groups.n_groups
    del views
    arena.close()
    assert n_groups > 1
    assert n_pages < geometry.groups.n_pages((len(PROMPT) + TOKENS) // geometry.page_tokens)
    return comparable(list(server.stream("/v1/generate", **REQUEST)))


@pytest.mark.parametrize("moment", [1, TOKENS // 2])
@pytest.mark.parametrize("names", [("kv",), ("worker",), ("scheduler",), ("kv", "scheduler"), ("kv", "worker")])
def test_a_killed_stage_changes_no_byte_of_a_long_stream(
    server: Server, undisturbed: str, names: tuple[str, ...], moment: int
) -> None:
    pids = [server.pid_of(process(name, "mixed")) for name in names]
    events, seen = [], 0
    for event in server.stream("/v1/generate", **REQUEST):
        events.append(event)
        before, seen = seen, seen + len(event.get("tokens", ()))
        if before < moment <= seen:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    assert comparable(events) == undisturbed
    assert all(wait_gone(pid) for pid in pids)


def test_two_long_streams_run_beside_a_dying_kv(server: Server, undisturbed: str) -> None:
    """More than the arena has room for: one of them may have to wait, and pages behind windows are evicted."""
    found: list[str] = []

    def run() -> None:
        found.append(comparable(list(server.stream("/v1/generate", **REQUEST))))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    os.kill(server.pid_of("kv"), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert found == [undisturbed] * 2


def test_every_page_is_accounted_for(server: Server, undisturbed: str) -> None:
    def check() -> dict[str, Any]:
        (model,) = json.loads(starling(server, "kv", "check", "--json"))["models"]
        return dict(model)

    # The kv stage learns a moment after the client that the last sequence has ended.
    poll_until(lambda: check()["audit"]["headers"][2] == 0, lambda: check()["audit"])
    model = check()
    counts = model["audit"]
    assert model["problems"] == []
    assert sum(counts["headers"]) == sum(counts["page_table"]) == model["total"]
    assert counts["headers"][2] == 0, "no sequence runs"
