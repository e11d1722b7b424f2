"""The faults that make each alert due, of a server with the small model `tiny`.

Most are those of `starling chaos`. A fault begins, is continued while its alerts have not fired, and ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeline.config.schema import Config
from pipeline.faults import points
from pipeline.faults.plan import install, read_armed
from pipeline.observe.status import StageStatus, read_all
from starling.chaos import faults as chaos
from starling.chaos.disks import FullDisk
from starling.chaos.processes import NoTargetError, send_signal

MODEL = "tiny"
QUEUE, BATCH = 4, 2  # of the server: waiting sequences, sequences in a step
SETTINGS = {"scheduler": {"max_queue_depth": QUEUE}, "performance": {"batch_size": BATCH}}
KILLS = 4  # one more than StarlingStageRestarts counts
READY_S = 120.0
PAUSE_S = 0.05  # of a client, after an answer
PROMPT = list(range(3, 103))

T = TypeVar("T")


class Fault(NamedTuple):
    """One fault. `alerts` fire because of it; `others` may."""

    what: str
    alerts: tuple[str, ...]
    begin: Callable[[], object]
    end: Callable[[], object] = lambda: None
    go_on: Callable[[], object] = lambda: None
    others: tuple[str, ...] = ()


class ServerFaults:
    """The faults of one server: its port, its run directory, and its configuration with that directory."""

    def __init__(self, port: int, run_dir: Path, config: Config) -> None:
        self._port = port
        self._run_dir = run_dir
        self._config = config
        self._rng = random.Random(1)
        self._stopped: list[int] = []
        self._crowd = Crowd(port)
        self._disk = FullDisk(config)

    def table(self) -> list[Fault]:
        """All of them, in the order in which they are injected: first those whose alerts take longest to resolve."""
        return [
            Fault("damage a page of the KV cache", ("StarlingDamagedPages",), self.damage_page),
            Fault("fill the disk", ("StarlingDiskErrors",), self._disk.begin, self._disk.end, self.request),
            Fault(  # a restart on a busy machine takes longer than the shortened time of the others
                "kill the tokenizer again and again",
                ("StarlingStageRestarts",),
                self.kill_tokenizer,
                others=("StarlingStageNotReady",),
            ),
            Fault(
                "kill the worker whenever it computes a certain request",
                ("StarlingQuarantine",),
                self.poison,
                others=("StarlingErrors", "StarlingStageNotReady", "StarlingStageRestarts"),
            ),
            Fault(
                "send more requests than the queue takes",
                ("StarlingOverloaded", "StarlingQueueDoesNotDrain"),
                self._crowd.begin,
                self._crowd.end,
            ),
            Fault(
                "freeze the tokenizer and its supervisor",
                ("StarlingStageNotReady", "StarlingErrors"),
                partial(self.freeze, "tokenizer"),
                self.thaw,
                partial(self.request, prompt="Once upon a time"),
            ),
            Fault(
                "freeze the gateway and its supervisor", ("StarlingDown",), lambda: self.freeze("gateway"), self.thaw
            ),
        ]

    def close(self) -> None:
        """End whatever has not ended. Idempotent."""
        self._crowd.end()
        self._disk.end()
        self.thaw()

    # -------------------------------------------------------------- faults

    def request(self, **fields: Any) -> int:
        """Send a request; the status of its answer, 0 without one."""
        return _post(self._port, {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **fields})

    def damage_page(self) -> None:
        """Flip bits of cached pages until a request has found one: pages that nothing uses are not verified."""
        self.request()
        for _ in range(100):
            with contextlib.suppress(NoTargetError):
                chaos.flip_bit(self._config, self._rng)
            self.request()
            if self._metric("starling_kv_cache_checksum_failures_total"):
                return
        raise RuntimeError("no request has found a damaged page")

    def kill_tokenizer(self) -> None:
        """Each time when the successor has become ready."""
        for _ in range(KILLS):
            pid = self._record("tokenizer").pid
            send_signal(self._config, "tokenizer", signal.SIGKILL)
            self._record("tokenizer", unlike=pid)

    def poison(self) -> None:
        """A fault plan that ends each worker at its first step, until the request is given up."""
        path = self._run_dir / points.FILE
        install(path, "worker:exit@step=1")
        try:
            worker = self._record(f"worker-{MODEL}").pid
            _wait(lambda: worker in read_armed(self._run_dir), "the worker does not follow the fault plan")
            if (status := self.request()) != 500:
                raise RuntimeError(f"the request that kills its worker was answered with {status}, not 500")
        finally:
            path.unlink(missing_ok=True)
        self._record(f"worker-{MODEL}")

    def freeze(self, stage: str) -> None:
        """SIGSTOP to the supervisor, which would kill a stage that hangs, and then to the stage."""
        record = self._record(stage)
        for pid in (record.parent, record.pid):
            os.kill(pid, signal.SIGSTOP)
            self._stopped.append(pid)

    def thaw(self) -> None:
        """Let what `freeze` has stopped continue. Idempotent."""
        while self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._stopped.pop(), signal.SIGCONT)

    # -------------------------------------------------------------- the server

    def _record(self, stage: str, unlike: int = 0) -> StageStatus:
        """The record of a stage that is ready, once its process is not `unlike`."""

        def found() -> StageStatus | None:
            for one in read_all(self._run_dir):
                if one.stage.partition("@")[0] == stage and one.alive and one.ready and one.pid != unlike:
                    return one
            return None

        return _wait(found, f"{stage} is not ready")

    def _metric(self, name: str) -> float:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class Crowd:
    """Clients that always have a request in flight: as many as run and wait at once, and some more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._over = threading.Event()
        self._clients: list[threading.Thread] = []

    def begin(self) -> None:
        """Start the clients."""
        self._over.clear()
        self._clients = [threading.Thread(target=self._client) for _ in range(QUEUE + BATCH + 4)]
        for client in self._clients:
            client.start()

    def end(self) -> None:
        """Wait for the last answers. Idempotent."""
        self._over.set()
        while self._clients:
            self._clients.pop().join()

    def _client(self) -> None:
        while not self._over.is_set():
            _post(self._port, {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True})
            self._over.wait(PAUSE_S)


def _post(port: int, body: dict[str, Any]) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S)) as connection:
        try:
            text = json.dumps({"model": MODEL, **body})
            connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            return response.status
        except (OSError, http.client.HTTPException):
            return 0


def _wait(found: Callable[[], T | None], otherwise: str) -> T:
    deadline = time.monotonic() + READY_S
    while not (value := found()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} after {READY_S:.0f} s")
        time.sleep(PAUSE_S)
    return value
