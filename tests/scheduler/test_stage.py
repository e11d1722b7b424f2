"""The scheduler process with real sockets: a worker that dies, a kv that restarts, a gateway that reconnects, and the
scheduler's own death. In every case streams end with their tokens."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.ipc.endpoint import Hub, Link
from pipeline.observe.metrics import Snapshot
from pipeline.protocol.messages import (
    Cancel,
    Frame,
    Heartbeat,
    KvAttach,
    Rejected,
    SchedulerState,
    Submit,
    Tokens,
)
from pipeline.protocol.topology import EDGES
from shm.step_ring import attach_steps

from .peers import Kv, Pages, reference, submission

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DIGEST = "ab" * 32
PAGES = 64
WAIT_S = 240.0  # that only a failure reaches


class Site:
    """A run directory with a scheduler process and a worker process; kv and gateway are part of the test."""

    def __init__(self, home: Path, **config: str) -> None:
        self.home = home
        self.run = home / "run"
        self.env = os.environ | {
            "STARLING_HOME": str(home),
            "STARLING_MODELS__0__NAME": "m",
            "STARLING_MODELS__0__PATH": str(home / "m.gguf"),
            "STARLING_MODELS__0__PAGE_TOKENS": "16",
            "STARLING_MODELS__0__MAX_BATCH_SIZE": "4",
            "STARLING_SERVER__HEARTBEAT_MS": "50",
            "STARLING_SERVER__ARENA_DIR": str(home / "arenas"),
            **config,
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.scheduler = self.start_scheduler()
        self.poison = self.stall = -1
        self.worker: subprocess.Popen[bytes] | None = None
        self.kv: Hub | None = None
        self.manager: Kv | None = None
        self.gateway: Link | None = None
        self.log: list[Frame] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.sent: dict[str, Submit] = {}

    # -------------------------------------------------------------- processes

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", *command], env=self.env, cwd=ROOT)
        self.processes.append(process)
        return process

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        self.scheduler = self._spawn("starling", "stage", "scheduler")
        return self.scheduler

    def start_worker(self) -> None:
        self.worker = self._spawn(
            "tests.scheduler.worker_process", str(self.run), "m", DIGEST, str(self.poison), str(self.stall)
        )

    def start_kv(self) -> None:
        self.manager = None
        self.run.mkdir(mode=0o700, exist_ok=True)
        address = f"ipc://{self.run}/scheduler-kv.sock"
        epoch = time.time_ns()
        self.kv = Hub(EDGES["scheduler-kv"], address, "kv", heartbeat_ms=50, epoch=epoch)

    def stop_kv(self, flush_ms: int = 0) -> None:
        """`flush_ms`: for answers that are on their way."""
        assert self.kv is not None
        self.kv.close(flush_ms)
        self.kv = None

    def start_gateway(self) -> None:
        address = f"ipc://{self.run}/gateway-scheduler.sock"
        self.gateway = Link(EDGES["gateway-scheduler"], address, "gateway", heartbeat_ms=50, epoch=time.time_ns())
        self.gateway.on_up = lambda hello: [self.submit_again(name) for name in self.sent]

    def stop_gateway(self) -> None:
        assert self.gateway is not None
        self.gateway.close(0)
        self.gateway = None

    def close(self) -> None:
        for endpoint in (self.kv, self.gateway):
            if endpoint is not None:
                endpoint.close(0)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    # -------------------------------------------------------------- traffic

    def submit(self, frame: Submit) -> None:
        self.sent[frame.sequence] = frame
        self.tokens[frame.sequence] = []
        if self.gateway is not None:
            self.gateway.send(frame)

    def submit_again(self, name: str) -> None:
        """Submit a sequence with its delivered tokens, as a gateway does after the scheduler has restarted."""
        if name not in self.ends and self.gateway is not None:
            forced = array("i", self.tokens[name]).tobytes()
            old = self.sent[name]
            self.gateway.send(Submit(**{f: getattr(old, f) for f in Submit.__struct_fields__} | {"forced": forced}))

    def pump(self, timeout: float = 0.02) -> None:
        """Exchange frames for a moment; restart the worker if it has died."""
        endpoints = [e for e in (self.kv, self.gateway) if e is not None]
        select.select([e.fd for e in endpoints], [], [], timeout)
        for endpoint in endpoints:
            endpoint.tick(Heartbeat("test", endpoint.epoch, 0, True, True))
        if self.kv is not None:
            for peer, frame in self.kv.receive():
                self._on_kv(peer, frame)
        if self.gateway is not None:
            for frame in self.gateway.receive():
                self._on_gateway(frame)
        if self.worker is not None and self.worker.poll() is not None:
            self.start_worker()

    def _on_kv(self, peer: bytes, frame: Frame) -> None:
        assert self.kv is not None
        if isinstance(frame, KvAttach):
            _, steps, _ = attach_steps(Path(frame.steps_path))
            path = str(self.home / "kv")
            self.manager = Kv(steps, Pages(PAGES, 16, path))
            self.manager.digest, self.manager.path = frame.digest, path
            self.kv.send(peer, self.manager.ready())
            return
        assert self.manager is not None
        answer = self.manager.handle(frame)
        if answer is not None:
            self.kv.send(peer, answer)

    def _on_gateway(self, frame: Frame) -> None:
        self.log.append(frame)
        if isinstance(frame, Rejected):
            assert frame.sequence not in self.ends
            self.ends[frame.sequence] = frame.code
        if isinstance(frame, Tokens):
            for part in frame.sequences:
                assert part.sequence not in self.ends
                have = self.tokens[part.sequence]
                assert part.start == len(have) or not part.tokens
                have.extend(part.tokens)
                if part.finish:
                    self.ends[part.sequence] = part.error or part.finish

    def until(self, condition) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"not in {WAIT_S:g} s; ends {self.ends}"
            self.pump()

    def start(self) -> None:
        self.start_kv()
        self.start_worker()
        self.start_gateway()
        self.until(self.is_ready)

    def is_ready(self) -> bool:
        return any(isinstance(f, SchedulerState) and f.models[0].ready for f in self.log)

    def all_ended(self) -> bool:
        return len(self.ends) == len(self.sent)

    def check(self) -> None:
        for name, frame in self.sent.items():
            assert (self.tokens[name], self.ends[name]) == reference(frame), name


@pytest.fixture
def site(request) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="st-") as home:
        site = Site(Path(home), **getattr(request, "param", {}))
        yield site
        site.close()


def load(site: Site, n: int = 8, length: int = 60) -> None:
    for i in range(n):
        site.submit(submission(f"s{i}", [i + 1] * (10 + 7 * i), length + i, seed=i))


def moving(site: Site) -> bool:
    return sum(len(t) for t in site.tokens.values()) > 40


def ahead(site: Site) -> int:
    """Tokens that sequences have pages for and that have not come yet."""
    assert site.manager is not None
    leases = {name.partition("~")[0]: pages for name, pages in site.manager.leases.items()}
    known = (len(site.sent[name].prompt) // 4 + len(site.tokens[name]) for name in leases)
    return sum(16 * len(pages) for pages in leases.values()) - sum(known)


def test_streams_end_with_their_tokens_and_a_stop_removes_all_files(site):
    site.start()
    load(site)
    site.until(site.all_ended)
    site.check()
    site.stop_gateway()
    site.scheduler.terminate()
    assert site.scheduler.wait(60) == 0
    assert not list((site.home / "arenas").rglob("*.steps"))


def test_metrics_reach_the_snapshot(site):
    site.start()
    load(site, 3, 30)
    site.until(site.all_ended)

    def shown() -> dict[str, float]:
        found = list((site.home / "arenas").rglob("scheduler.metrics"))
        if not found:
            return {}
        families = msgspec.msgpack.decode(found[0].read_bytes(), type=Snapshot).families
        return {name: sum(s.value for s in series) for name, series in families.items()}

    expected = sum(len(t) for t in site.tokens.values())
    site.until(lambda: shown().get("starling_tokens_generated_total") == expected)
    figures = shown()
    assert figures["starling_finished_total"] == 3
    assert figures["starling_queue_depth"] == 0
    assert figures["starling_tenant_tokens_total"] >= expected


def test_unknown_models_and_late_cancels(site):
    site.start()
    assert site.gateway is not None
    site.gateway.send(Cancel("unknown"))
    site.submit(submission("x", [1], 3, model="other"))
    site.until(lambda: "x" in site.ends)
    assert site.ends == {"x": "MODEL_NOT_FOUND"}


def test_no_token_is_lost_with_a_killed_worker(site):
    site.start()
    load(site)
    for _ in range(3):
        before = sum(len(t) for t in site.tokens.values())
        site.until(lambda: sum(len(t) for t in site.tokens.values()) > before + 40)  # noqa: B023
        assert site.worker is not None
        site.worker.kill()
        site.worker.wait()
    site.until(site.all_ended)
    site.check()


def test_a_poisoned_request_ends_alone(site):
    site.poison = 100
    site.start()
    load(site, 4)
    site.submit(submission("bad", [9] * 30 + [100, 3], 20))
    site.until(site.all_ended)
    assert site.ends.pop("bad") == "INFERENCE"
    del site.sent["bad"]
    site.check()


@pytest.mark.parametrize("site", [{"STARLING_RATE_LIMITS__MAX_QUEUE_DEPTH": "2"}], indirect=True)
def test_each_tenant_has_its_own_queue_bound(site):
    site.start_kv()
    site.start_gateway()  # without a worker all sequences wait
    site.until(lambda: any(isinstance(f, SchedulerState) for f in site.log))
    for i in range(3):
        site.submit(submission(f"a{i}", [1], 5, tenant="a"))
    site.submit(submission("b0", [1], 5, tenant="b"))
    site.until(lambda: bool(site.ends))
    assert site.ends == {"a2": "OVERLOADED"}
    (refused,) = (frame for frame in site.log if isinstance(frame, Rejected))
    assert refused.retry_after_s >= 1
    site.start_worker()
    site.until(site.all_ended)
    del site.sent["a2"]
    site.check()


@pytest.mark.parametrize("site", [{"STARLING_SCHEDULER__STUCK_STEP_MS": "300"}], indirect=True)
def test_a_stalled_step_is_killed_and_repeated(site):
    site.stall = 101
    site.start()
    load(site, 3)
    site.submit(submission("slow", [9] * 30 + [101, 3], 20))
    site.until(site.all_ended)
    site.check()


# kv and gateway are silent while the test has no core. A scheduler that has lost them for that waits for kv.
@pytest.mark.parametrize("site", [{"STARLING_SERVER__HEARTBEAT_MS": "2000"}], indirect=True)
def test_leases_are_reconciled_after_a_restart_of_kv(site):
    site.start()
    load(site, 8, 200)
    site.until(lambda: moving(site) and ahead(site) > 40)  # a scheduler that waits for kv would only wait on
    site.stop_kv(flush_ms=10_000)
    before = sum(len(t) for t in site.tokens.values())
    site.until(lambda: sum(len(t) for t in site.tokens.values()) > before + 10)
    site.start_kv()
    site.until(site.all_ended)
    site.check()


def test_the_schedulers_death_only_delays_streams(site):
    site.start()
    load(site, 8, 150)
    site.until(lambda: moving(site))
    site.scheduler.kill()
    site.scheduler.wait()
    site.start_scheduler()
    site.until(site.all_ended)
    site.check()


def test_a_gateway_that_restarts_resumes_its_streams(site):
    site.start()
    load(site, 8, 150)
    site.until(lambda: moving(site))
    site.stop_gateway()
    site.start_gateway()
    site.until(site.all_ended)
    site.check()


def test_a_stopped_worker_is_fenced_when_its_heartbeats_stop(site):
    site.start()
    load(site, 4, 150)
    site.until(lambda: moving(site))
    assert site.worker is not None
    stopped = site.worker
    stopped.send_signal(signal.SIGSTOP)
    site.until(lambda: site.worker is not stopped)
    assert stopped.returncode == -signal.SIGKILL
    site.until(site.all_ended)
    site.check()
