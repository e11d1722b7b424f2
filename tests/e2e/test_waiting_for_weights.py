"""A worker that waits for weights still handles messages and signals: whatever dies, the answer keeps its bytes.

This test plays the download: it has the record of the verified bytes, and holds the last layers back.
"""

from __future__ import annotations

import hashlib
import http.client
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.observe.status import read_all
from shm.arrival import ArrivalWriter, arrival_path
from shm.checkpoint import load_index
from stages.worker.arriving_weights import layer_ends
from stages.worker.checkpoint.ingest import ingest
from tests.e2e.bare import BareServer
from tests.e2e.conftest import share_caches
from tests.e2e.server import START_S, STOP_S, poll_until, wait_gone
from tools.tiny_gguf import Shape, write_model

pytestmark = pytest.mark.slow

SHAPE = Shape(6, 64, 2, 1, 32, 96, 300)
N_HERE = 3  # layers whose weights are here
REQUEST: dict[str, Any] = {"prompt": [5, 6, 7, 8], "max_tokens": 24, "seed": 3, "temperature": 0.9, "ignore_eos": True}
WAITS = "layers are computed as they arrive"
BEAT_S = 1.0


class Download:
    """The weights beside an index, of which the first layers are here."""

    def __init__(self, index_path: Path) -> None:
        self._index_path = index_path
        self._path = index_path.with_suffix(".bin")
        self._content = self._path.read_bytes()
        self._writer: ArrivalWriter | None = None
        self._ended = threading.Event()

    def begin(self) -> None:
        """No process may map the file."""
        here = layer_ends(load_index(self._index_path))[N_HERE - 1]
        assert here < len(self._content)
        self._path.unlink()
        self._path.write_bytes(self._content[:here] + bytes(len(self._content) - here))
        self._writer = ArrivalWriter(arrival_path(self._index_path))
        self._writer.advance(here)

    def beat(self) -> None:
        """Give signs of life until the download ends."""
        assert self._writer is not None
        while not self._ended.wait(BEAT_S):
            self._writer.beat()

    def finish(self) -> None:
        assert self._writer is not None
        with self._path.open("r+b") as file:
            file.write(self._content)
        self._writer.advance(len(self._content))
        self._writer.finish(is_complete=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """From `begin` on."""
        self.begin()
        thread = threading.Thread(target=self.beat)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()


class Waiting(BareServer):
    """Restarts the stages, and waits for a step that waits for weights."""

    def end(self, stage: str, number: int = signal.SIGKILL) -> None:
        self.stages[stage].send_signal(number)
        self.wait_end(stage)

    def wait_end(self, stage: str) -> None:
        assert wait_gone(self.stages[stage].pid, STOP_S), "".join(self.output[-40:])
        self.stages.pop(stage).wait()

    def wait_step(self, since: int) -> None:
        """A step has begun since the output had `since` lines, and has the layers that are here."""
        self.wait_output("worker", WAITS, since=since)

    def wait_stopping(self) -> None:
        """The worker reports that it stops; it ticks meanwhile."""
        deadline = time.monotonic() + STOP_S
        run_dir = self.home / "run"
        while not any(one.reason == "stopping" for one in read_all(run_dir) if one.stage.startswith("worker")):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def connect(self, timeout_s: float = 2 * START_S) -> http.client.HTTPConnection:
        """An answer waits for the starts of several stages."""
        return super().connect(timeout_s)

    def answer(self) -> list[int]:
        events = list(self.stream("/v1/generate", **REQUEST))
        assert not [event for event in events if "error" in event], events[-1]
        return [token for event in events for token in event.get("tokens", ())]


def prepared(folder: Path) -> Path:
    """The index of a model."""
    gguf = write_model(folder / "tiny.gguf", SHAPE, "Q8_0")
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    (folder / "models").mkdir()
    index_path = folder / "models" / f"{digest}.idx"
    ingest(gguf, index_path, digest)
    return index_path


def test_a_worker_that_waits_for_weights_handles_messages(tmp_path: Path) -> None:
    share_caches(tmp_path)
    index_path = prepared(tmp_path)
    config = {
        "models": [{"name": "tiny", "path": str(index_path), "kv_cache_mb": 16, "ranks": 2}],
        "cache": {"enabled": False},  # pages of the first answer would be used for the second one
        # The request waits for the starts of five programs, beside other work.
        "server": {"drain_timeout_ms": 600_000, "request_timeout_ms": 3_600_000},
    }
    with Waiting(tmp_path, config) as server, ThreadPoolExecutor() as pool:
        expected = server.answer()
        assert len(expected) == REQUEST["max_tokens"]
        server.end("worker")
        poll_until(lambda: server.request("GET", "/ready")[0] == 503)
        download = Download(index_path)
        with download.running():
            since = len(server.output)
            server.start_stage("worker")
            # A request waits for its model for some seconds only, and this worker is a new program.
            poll_until(lambda: server.request("GET", "/ready")[0] == 200, timeout_s=START_S)
            answer = pool.submit(server.answer)
            server.wait_step(since)

            # A successor of the scheduler attaches the worker anew, and so it does for a kv with another arena.
            worker = server.stages["worker"]
            for stage in ("scheduler", "kv"):
                since = len(server.output)
                server.end(stage)
                if stage == "kv":
                    next(server.arenas.rglob("*.kv")).unlink()
                server.start_stage(stage)
                server.wait_step(since)
                assert worker.poll() is None
                assert not answer.done()

            # Without a scheduler nothing needs the worker: it ends long before its drain time.
            server.end("scheduler")
            server.end("worker", signal.SIGTERM)
            for stage in ("scheduler", "worker"):
                since = len(server.output)
                server.start_stage(stage)
            server.wait_step(since)

            # With one it drains, until a second signal comes.
            server.stages["worker"].terminate()
            server.wait_stopping()
            server.end("worker", signal.SIGTERM)
            since = len(server.output)
            server.start_stage("worker")
            server.wait_step(since)
            assert not answer.done()

            download.finish()
            assert answer.result(START_S) == expected
