"""/ready answers 503 within a second of a stage's stop, and stays 200 during long work that makes progress.

Both hold for processes that get a core when they can run. Where one waited for a core, the kernel's count of that wait
(core_waits.py) is subtracted or must explain what /ready said; a machine without a free core fails no test.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.bare import BareServer
from tests.e2e.conftest import share_caches
from tests.e2e.core_waits import CoreWaits, own_run_queue_delay_s, run_queue_delay_s, stolen_s
from tests.e2e.server import START_S, Server, poll_until, wait_gone
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

REQUEST: dict[str, Any] = {
    "prompt": [1, 2, 3],
    "max_tokens": 3000,
    "ignore_eos": True,
    "temperature": 0.9,
    "seed": 5,
    "logprobs": 1,
}
WITHIN_S = 1.0
STAGES = ("tokenizer", "scheduler", "kv", "worker-tiny", "worker-tiny/1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareServer]:
    home = tmp_path_factory.mktemp("bare")
    share_caches(home)
    path = write_model(home / "tiny.gguf", SHAPES["small"]._replace(context_length=4096))
    config = {"models": [{"name": "tiny", "path": str(path), "kv_cache_mb": 16, "ranks": 2}]}
    with BareServer(home, config) as server:
        probe = Probe(server)
        probe.wait(True, START_S)
        probe.close()
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: BareServer) -> list[Any]:
    return answer(list(server.stream("/v1/generate", **REQUEST)))


def answer(events: list[dict[str, Any]]) -> list[Any]:
    """(token, log-probabilities) of a stream that must not have failed."""
    assert not [event for event in events if "error" in event], events[-1]
    tokens: list[Any] = []
    for event in events:
        tokens += zip(event.get("tokens", ()), map(json.dumps, event.get("logprobs") or ()), strict=True)
    return tokens


class Probe:
    """Requests /ready over one connection."""

    def __init__(self, server: Server) -> None:
        self._connection: http.client.HTTPConnection = server.connect(10)

    def request(self) -> tuple[bool, str]:
        """Ready or not, and the reason."""
        self._connection.request("GET", "/ready")
        response = self._connection.getresponse()
        body = json.loads(response.read())
        assert response.status == (200 if body["ready"] else 503)
        return body["ready"], body["reason"] or ""

    def wait(self, is_ready: bool, timeout_s: float = 30.0) -> tuple[float, str]:
        """Request /ready until it answers `is_ready`: the seconds that this took, and the reason."""
        begun = time.monotonic()
        while True:
            ready, reason = self.request()
            waited = time.monotonic() - begun
            if ready is is_ready:
                return waited, reason
            assert waited < timeout_s, reason

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def probe(server: BareServer) -> Iterator[Probe]:
    probe = Probe(server)
    yield probe
    probe.close()


class Stream(threading.Thread):
    """A stream in flight, read to its end; `begun` is set at its first token."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.events: list[dict[str, Any]] = []
        self._server = server
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        for event in self._server.stream("/v1/generate", **REQUEST):
            self.events.append(event)
            self.begun.set()

    def finish(self) -> list[Any]:
        self.join(120)
        assert not self.is_alive()
        return answer(self.events)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("name", STAGES)
def test_ready_reports_a_stopped_stage_within_a_second(
    server: BareServer, undisturbed: list[Any], probe: Probe, name: str
) -> None:
    probe.wait(True)
    stream = Stream(server)
    deciding = [server.pid_of(stage) for stage in ("gateway", "scheduler")]  # they detect it and report it

    def core_waits_s() -> float:
        return own_run_queue_delay_s() + sum(map(run_queue_delay_s, deciding))

    with stopped(server.pid_of(name)):
        before_s, stolen_before_s = core_waits_s(), stolen_s()
        waited_s, reason = probe.wait(False)
        starved_s = core_waits_s() - before_s + stolen_s() - stolen_before_s
    assert waited_s - starved_s < WITHIN_S, (waited_s, starved_s, reason)
    # The reason names the stopped stage, or the scheduler, whose work waits for that stage.
    assert ("worker" if "worker" in name else name) in reason or "scheduler: has work" in reason

    def is_ready() -> bool:
        """If this test had no core for seconds, the scheduler has fenced a stopped worker, and no supervisor runs."""
        if server.stages["worker"].poll() is not None:
            server.start_stage("worker")
        return probe.request()[0]

    poll_until(is_ready, probe.request)
    assert stream.finish() == undisturbed


@pytest.mark.parametrize("name", ["tokenizer", "scheduler", "kv"])
def test_a_stage_that_continues_after_its_peers_gave_it_up_changes_no_byte(
    server: BareServer, undisturbed: list[Any], probe: Probe, name: str
) -> None:
    """SIGCONT comes just after the peers have closed the stage's connections, which the stage cannot have noticed."""
    probe.wait(True)
    stream = Stream(server)
    pid = server.pid_of(name)
    with stopped(pid):
        server.wait_for(rf"peer down.*peer={name}\b.*heartbeats have stopped")
    assert stream.finish() == undisturbed
    assert server.pid_of(name) == pid
    probe.wait(True)


def test_a_stopped_worker_group_is_fenced_before_its_successor_starts(
    server: BareServer, undisturbed: list[Any], probe: Probe
) -> None:
    probe.wait(True)
    stream = Stream(server)
    rank = server.pid_of("worker-tiny/1")
    leader = server.pid_of("worker-tiny")
    for pid in (leader, rank):
        os.kill(pid, signal.SIGSTOP)
    server.wait_for("worker group is fenced")
    assert wait_gone(leader)
    assert wait_gone(rank)
    server.stages["worker"].wait()
    server.start_stage("worker")
    assert stream.finish() == undisturbed
    probe.wait(True)


# ------------------------------------------------------------------ long work


def always_ready(server: Server, work: Callable[[], Any]) -> Any:
    """Do `work` while /ready is requested all the time: it must answer 200.

    The only excuse for another answer is a process that had no core for that time (`CoreWaits.explain`).
    """
    over = threading.Event()
    refusals: list[tuple[float, str]] = []
    waits = CoreWaits(server.home / "run")

    def watch() -> None:
        probe = Probe(server)
        while not over.wait(0.02):  # the interval of the requests
            ready, reason = probe.request()
            if not ready:
                refusals.append((time.monotonic(), reason))
            waits.sample()
        if refusals:
            probe.wait(True)  # every stage has run again
            waits.sample()
        probe.close()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        done = work()
    finally:
        over.set()
        watcher.join()
        waits.stop()
    assert [reason for at, reason in refusals if not waits.explain(reason, at)] == []
    return done


def test_long_prompts_that_evict_each_other_are_progress(demo_server: Server) -> None:
    """The second prompt needs the pages of the first, which are spilled to a file meanwhile."""

    def ask(first: int, count: int) -> int:
        prompt = [(7 * i) % 40_000 + first for i in range(count)]
        answer = demo_server.post("/v1/generate", prompt=prompt, max_tokens=2)
        return int(answer["usage"]["prompt_tokens"])

    before = sum(demo_server.metrics("starling_kv_cache_evictions_total").values())
    assert always_ready(demo_server, lambda: (ask(100, 4000), ask(200, 2200))) == (4000, 2200)
    demo_server.wait_metrics("starling_kv_cache_evictions_total", lambda found: sum(found.values()) > before)


def test_a_long_text_is_progress(demo_server: Server) -> None:
    text = "The lighthouse keeper, 1234 steps up; " * 60_000
    counted = always_ready(demo_server, lambda: demo_server.post("/v1/tokenize", text=text))["count"]
    assert counted > 400_000
