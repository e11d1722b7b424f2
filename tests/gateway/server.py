"""A gateway process between scripted peers on real sockets."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.ipc.endpoint import Hub
from pipeline.protocol import messages as m
from stages.tokenizer.service import TokenizerService
from tests.gateway.http_client import Answer, HttpClient
from tests.gateway.peers import MODEL, Generator, make_tokenizer
from tests.gateway.threaded import Threaded
from tests.warm_programs import WarmProgram

STEP_S, TICK_S = 0.002, 0.05  # longest time between two rounds while sequences are generated, and otherwise
# A `preamble` for tests that use up quotas: their minutes and days last so long that none refills meanwhile.
LONG_MINUTE_S, LONG_DAY_S = 600_000, 864_000_000
LONG_MINUTE = f"import pipeline.api.quotas as q; q.MINUTE_S, q.DAY_S = {LONG_MINUTE_S}.0, {LONG_DAY_S}.0"


class Peers(Threaded):
    """Tokenizer and scheduler in a thread. `do` runs a function in it, between two rounds."""

    def __init__(self, config: Config, tokenizer: Callable[[], TokenizerService] = make_tokenizer) -> None:
        super().__init__(config, STEP_S)
        self.generator = Generator()
        self.generator.is_starting = True
        self._make_tokenizer = tokenizer
        self.tokenizer = tokenizer()
        self.tokens_per_step = 1
        self.step_interval_s = 0.0  # least time between two steps
        self._next_step = 0.0
        self.is_stepping = True
        self.model_ready = True
        self.waiting = 0  # sequences in the queue of the model, as the scheduler reports them
        self.tokenizer_hub: Hub | None = None
        self.scheduler_hub: Hub | None = None
        self._next_tick = 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, sequences are started but get tokens from `step` alone: none ends before a test expects it."""
        self.do(lambda: setattr(self, "is_stepping", False))
        try:
            yield
        finally:
            self.do(lambda: setattr(self, "is_stepping", True))

    def step(self, n: int = 1) -> None:
        """Generate up to n tokens of each running sequence."""
        self.do(lambda: self.generator.step(n))

    # In the thread (call them through `do`).

    def start_tokenizer(self) -> None:
        self.tokenizer = self._make_tokenizer()
        self.tokenizer_hub = self.bind("gateway-tokenizer", "tokenizer")

    def start_scheduler(self) -> None:
        refuse = self.generator.refuse
        self.generator = Generator()
        self.generator.is_starting = True
        self.generator.refuse = refuse
        self.scheduler_hub = self.bind("gateway-scheduler", "scheduler")

    def kill_tokenizer(self) -> None:
        assert self.tokenizer_hub is not None
        self.tokenizer_hub.close(0)
        self.tokenizer_hub = None

    def kill_scheduler(self) -> None:
        assert self.scheduler_hub is not None
        self.scheduler_hub.close(0)
        self.scheduler_hub = None

    def begin(self) -> None:
        self.start_tokenizer()
        self.start_scheduler()

    def hubs(self) -> list[Hub]:
        return [hub for hub in (self.tokenizer_hub, self.scheduler_hub) if hub is not None]

    def pause_s(self) -> float:
        """Rounds in which nothing happens would take time from the gateway; frames and `do` begin one at once."""
        if self.is_stepping and (self.generator.running or self.generator.pooling):
            return super().pause_s()
        return max(0.0, self._next_tick - time.monotonic())

    def serve_round(self) -> None:
        now = time.monotonic()
        is_due = now >= self._next_tick
        if is_due:
            self._next_tick = now + TICK_S
        if self.tokenizer_hub is not None:
            for peer, frame in self.tokenizer_hub.receive():
                answer = self.tokenizer.reply(frame)
                if answer is not None:
                    self.tokenizer_hub.send(peer, answer)
            if is_due:
                self.tokenizer_hub.tick(self._beat("tokenizer"))
        hub = self.scheduler_hub
        if hub is None:
            return
        for _, frame in hub.receive():
            self.generator.receive(frame)
        if self.is_stepping and now >= self._next_step:
            self._next_step = now + self.step_interval_s
            self.generator.step(self.tokens_per_step)
        for peer in hub.peers:
            for frame in self.generator.outbox:
                hub.send(peer, frame)
            self.generator.outbox.clear()
            if is_due:
                reason = "" if self.model_ready else "its worker is compiling"
                state = m.ModelState(MODEL, "ab" * 32, self.model_ready, reason, self.waiting, 0, 8)
                hub.send(peer, m.SchedulerState([state]))
        if is_due:
            hub.tick(self._beat("scheduler"))

    def _beat(self, stage: str) -> m.Heartbeat:
        return m.Heartbeat(stage, self._epoch, 0, False, True)


class Server(HttpClient):
    """The gateway's process and its peers."""

    def __init__(
        self,
        home: Path,
        *,
        pass_fds: tuple[int, ...] = (),
        preamble: str = "",
        tokenizer: Callable[[], TokenizerService] = make_tokenizer,
        **sections: Any,
    ) -> None:
        """`preamble`: Python that runs in the gateway's process before the gateway, to change a constant."""
        self.home = home
        self._preamble = preamble
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = {"port": 0, "arena_dir": str(home / "shm"), **sections.pop("server", {})}
        file = home / "starling.yaml"
        model = {"name": MODEL, "path": str(home / "none.gguf")}
        content = {"server": server, "models": [model], "logging": {"format": "json"}, **sections}
        file.write_text(yaml.safe_dump(content))
        self.env = {**os.environ, "STARLING_HOME": str(home), "STARLING_CONFIG": str(file)}
        self.config = load(file, {"STARLING_HOME": str(home), "STARLING_SERVER__RUN_DIR": str(home / "run")})
        (home / "run").mkdir(mode=0o700, exist_ok=True)
        self.lines: list[str] = []
        self._start(pass_fds)
        self.peers = Peers(self.config, tokenizer)
        self.peers.start()
        self.port = int(self.wait_log("listening").get("port", 0))

    def _start(self, pass_fds: tuple[int, ...] = ()) -> None:
        self.process: WarmProgram | subprocess.Popen[str]
        if self._preamble or pass_fds:
            run = "import runpy; runpy.run_module('starling', run_name='__main__')"
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{self._preamble}\n{run}", "stage", "gateway"],
                env=self.env,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
                pass_fds=pass_fds,
            )
        else:
            self.process = WarmProgram(["starling", "stage", "gateway"], self.env)
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def kill_and_restart(self) -> None:
        """Kill the gateway and start a successor, as a supervisor does; on another port."""
        self.process.kill()
        self.process.wait()
        self.start_successor()

    def start_successor(self) -> None:
        """Start a gateway after one that has ended, or will; on another port."""
        self.process.wait(60)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._start()
        self.port = int(self.wait_log("listening").get("port", 0))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            try:
                self._events.put(json.loads(line))
            except ValueError:
                continue
        self._events.put({"event": "end of log"})

    def wait_log(self, event: str, timeout_s: float = 180.0) -> dict[str, Any]:
        """The next log line with that event."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            if line["event"] == event:
                return line
            if line["event"] == "end of log":
                raise AssertionError(f"the gateway ended without {event!r}:\n" + "".join(self.lines))

    def wait_ready(self) -> None:
        self.wait_log("ready")

    def ready(self) -> Answer:
        """The answer of /ready, once it is a 200 or does not come from the state of the stages.

        The peers are silent while this process has no core.
        """
        deadline = time.monotonic() + 60
        while True:
            answer = self.get("/ready")
            if answer.status == 200 or "stages" not in answer.json or time.monotonic() > deadline:
                return answer

    def close(self) -> int:
        """Send SIGTERM. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except (TimeoutError, subprocess.TimeoutExpired):
            self.process.kill()
            raise
        self.peers.stop()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


MakeServer = Callable[..., Server]
