"""Two models in one server: each has its own worker group, arena, queue and cores."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.observe.status import read_all
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, poll_until
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("two")
    share_caches(home)
    models = [
        {
            "name": name,
            "path": str(write_model(home / f"{name}.gguf", SHAPES["small"], seed=i)),
            "kv_cache_mb": 8,
            "cpus": [CORES[i % len(CORES)]],
            "max_batch_size": 4,
        }
        for i, name in enumerate(("one", "two"))
    ]
    with Server(home, {"models": models, "rate_limits": {"max_queue_depth": 6}}) as server:
        yield server
        server.stop()
        assert server.leftovers() == []


def ask(server: Server, model: str, i: int = 0, tokens: int = 24) -> tuple[int, Any, dict[str, str]]:
    body = {"model": model, "prompt": [5 + i, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return server.request("POST", "/v1/generate", body)


def test_each_model_has_its_own_workers_arena_and_cores(server: Server) -> None:
    answers = {model: ask(server, model) for model in ("one", "two")}
    assert {status for status, _, _ in answers.values()} == {200}
    tokens = {model: answer["choices"][0]["tokens"] for model, (_, answer, _) in answers.items()}
    assert tokens["one"] != tokens["two"], "other weights"
    pids = {model: server.pid_of(f"worker-{model}") for model in ("one", "two")}
    assert pids["one"] != pids["two"]
    for i, pid in enumerate(pids.values()):
        assert os.sched_getaffinity(pid) == {CORES[i % len(CORES)]}
    arenas = {Path(name).name for name in server.leftovers() if name.endswith((".kv", ".steps", ".act"))}
    kinds = [sum(name.endswith(kind) for name in arenas) for kind in (".kv", ".steps", ".act")]
    assert kinds == [2, 2, 2]
    server.wait_metrics("starling_queue_depth", lambda found: set(found) == {'model="one"', 'model="two"'})


def test_a_full_queue_of_one_model_does_not_delay_the_other(server: Server) -> None:
    alone = ask(server, "two", 1)[1]["choices"]
    with ThreadPoolExecutor(48) as pool:
        flood = [pool.submit(ask, server, "one", i, 600) for i in range(48)]
        others = [ask(server, "two", 1) for _ in range(3)]
        answers = [asked.result() for asked in flood]
    assert [status for status, _, _ in others] == [200] * 3
    assert all(answer["choices"] == alone for _, answer, _ in others)
    refused = [(answer, headers) for status, answer, headers in answers if status == 429]
    assert sum(status == 200 for status, _, _ in answers) >= 6
    assert refused, "of 48 at once 4 compute, 2 stand by and 6 wait"
    for answer, headers in refused:
        assert answer["error"]["code"] == "OVERLOADED" and "at most 6" in answer["error"]["message"]
        assert int(headers["Retry-After"]) >= 1


def test_requests_wait_a_bounded_time_for_a_model_that_is_loading(server: Server) -> None:
    expected = ask(server, "two")[1]["choices"]
    (record,) = (record for record in read_all(server.home / "run") if record.stage == "worker-two")
    os.kill(record.parent, signal.SIGSTOP)  # no supervisor restarts it
    os.kill(record.pid, signal.SIGKILL)
    try:
        # Requests that arrive before the gateway receives the new state wait in the scheduler's queue, and longer.
        poll_until(lambda: not server.request("GET", "/ready")[1]["models"]["two"]["ready"])
        status, answer, headers = ask(server, "two")
        assert (status, answer["error"]["code"]) == (503, "MODEL_UNAVAILABLE")
        assert int(headers["Retry-After"]) >= 1
        assert ask(server, "one")[0] == 200
        waiting: list[tuple[int, Any, dict[str, str]]] = []
        thread = threading.Thread(target=lambda: waiting.append(ask(server, "two")))
        thread.start()
    finally:
        os.kill(record.parent, signal.SIGCONT)
    thread.join()
    assert waiting[0][0] == 200
    assert waiting[0][1]["choices"] == expected
