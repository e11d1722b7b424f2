"""An engine computes while its model is still downloaded; whatever dies meanwhile, its answers have the same bytes."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.observe.status import read_all
from shm.checkpoint import PIECE_BYTES
from stages.agent.engines.starling_engine import engine_run_dir
from stages.worker.kernels import build
from tests.e2e.conftest import share_caches
from tests.e2e.server import START_S
from tests.fleet.agent_process import Agent, post, publish_tiny
from tests.fleet.range_server import Handler, RangeServer, served
from tools.tiny_gguf import Shape

SHAPE = Shape(10, 512, 8, 2, 64, 1536, 1024)  # 33 MB as Q8_0: four pieces, seven layers in the first three
LAST = 3
CHAT = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "hello there"}], "temperature": 0}
STREAMING = "layers are computed as they arrive"


class Gate:
    """Holds the last piece of the model back, and damages another one the first time it is sent."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_lost = False
        self._has_damaged = False

    def close(self) -> None:
        self._is_lost = False
        self._is_open.clear()

    def open(self, *, is_lost: bool = False) -> None:
        """`is_lost`: the store has no weights any more."""
        self._is_lost = is_lost
        self._is_open.set()

    def __call__(self, handler: Handler, body: bytes) -> bool:
        if not handler.path.endswith(".bin") or "Range" not in handler.headers:
            return False
        first = int(handler.headers["Range"].removeprefix("bytes=").split("-")[0])
        if first // PIECE_BYTES == 1 and not self._has_damaged:
            self._has_damaged = True
            handler.send_range(first, 1 << 40, bytes(len(body)))
            return True
        if first // PIECE_BYTES >= LAST:
            self._is_open.wait()
            if self._is_lost:
                handler.refuse(404)
                return True
        return False


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RangeServer]:
    build.build("f16")
    folder = tmp_path_factory.mktemp("blobs")
    publish_tiny(tmp_path_factory.mktemp("published"), folder, shape=SHAPE)
    with served(folder) as server:
        yield server


class Admitting(Agent):
    """Its engines get requests however long the rest of a download takes (the bound: test_admission.py)."""

    preamble = "from stages.agent import placement; placement.ADMIT_S = placement.WITHDRAW_S = float('inf')"


class Client:
    """Asks the engine of an agent in a thread."""

    def __init__(self, agent: Agent, pool: ThreadPoolExecutor) -> None:
        self.agent = agent
        self._pool = pool

    @property
    def home(self) -> Path:
        """Of the engine."""
        (home,) = (self.agent.home / "agent" / "engines").iterdir()
        return home

    def n_streamed(self) -> int:
        """How often a worker of this agent has begun a step whose last weights were missing."""
        logs = (self.agent.home / "agent" / "engines").glob("*/logs/worker*.log*")
        return sum(path.read_text().count(STREAMING) for path in logs)

    def ask(self, before: int | None = None) -> Future[tuple[int, Any]]:
        """Load the model, ask for an answer, and return when the engine waits for weights in the middle of a step.

        before: `n_streamed` before the engine's start, if that has requests of an earlier one; None: it has none.
        """
        before = self.n_streamed() if before is None else before
        status, loaded = self.agent.call("/load_model", model_id="tiny")
        assert status == 200, loaded
        model = self.agent.model("tiny")
        assert (model["cache_state"], model["cache_level"]) == ("READY", "REMOTE")
        assert model["progress"]["phase"] == "download"
        future = self._pool.submit(post, loaded["inference_endpoint_url"], CHAT, loaded["engine_key"])
        self.wait_streamed(before, future)
        return future

    def wait_streamed(self, before: int, future: Future[tuple[int, Any]]) -> None:
        def has_streamed() -> bool:
            assert not future.done(), future.result()
            return self.n_streamed() > before

        wait_until(has_streamed)

    def worker(self) -> int:
        run_dir = engine_run_dir(self.home, self.agent.environment)
        return next(one.pid for one in read_all(run_dir) if one.stage.startswith("worker") and one.alive)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_failed(future: Future[tuple[int, Any]]) -> bool:
    """Whether a request has ended with an error, or without an answer."""
    try:
        return future.result()[0] >= 500
    except (OSError, http.client.HTTPException, ValueError):
        return True


def settings(store: RangeServer) -> dict[str, Any]:
    # A lease that outlasts any pause of a busy machine: with a shorter one an agent refuses what it is asked for.
    agent = {"lease_ms": 600_000, "peers": False}
    return {"cache": {"max_size_mb": 32}, "fleet": {"blobs": store.url, "agent": agent}}


@pytest.mark.slow
def test_layers_are_computed_as_they_arrive(tmp_path: Path, store: RangeServer) -> None:
    share_caches(tmp_path)
    store.fault = gate = Gate()
    with ThreadPoolExecutor() as pool, Admitting(tmp_path, settings(store)) as agent:
        assert agent.process is not None
        client = Client(agent, pool)
        try:
            # A worker is killed in the middle of the first prompt: its successor waits for the same bytes.
            first = client.ask()
            before = client.n_streamed()
            os.kill(client.worker(), signal.SIGKILL)
            client.wait_streamed(before, first)
            gate.open()
            status, answer = first.result()
            assert status == 200, answer
            wait_until(lambda: agent.model("tiny")["cache_level"] == "CPU_RESIDENT")
            assert agent.call("/unload_model", model_id="tiny")[0] == 200
            assert not (client.home / "arriving").exists()

            # From the disk, as ever.
            status, loaded = agent.call("/load_model", model_id="tiny")
            assert status == 200, loaded
            status, expected = post(loaded["inference_endpoint_url"], CHAT, loaded["engine_key"])
            assert (status, expected["choices"]) == (200, answer["choices"])
            assert agent.call("/unload_model", model_id="tiny", drop_cached=True)[0] == 200

            # The agent is killed: its successor continues the download and loads the model.  The new engine computes
            # the lost request again, which is in its journal: the next one may have to wait behind it.
            gate.close()
            lost = client.ask()
            agent.process.kill()
            agent.process.wait()
            assert has_failed(lost)
            before = client.n_streamed()
            agent.start().wait_ready()
            agent.wait_for("model is ready")
            again = client.ask(before)

            # The store loses the model: the request ends with an error, and so does the model.
            gate.open(is_lost=True)
            agent.wait_for("model failed")
            assert has_failed(again)
            assert agent.model("tiny")["cache_state"] == "FAILED"
            assert not (client.home / "arriving").exists()

            # It has it again.
            gate.open()
            status, loaded = agent.call("/load_model", model_id="tiny")
            assert status == 200, loaded
            status, last = post(loaded["inference_endpoint_url"], CHAT, loaded["engine_key"])
            assert (status, last["choices"]) == (200, answer["choices"])
        finally:
            gate.open()
