"""What the orchestrator adds and forwards, in front of an engine that computes nothing (stand_in.py).

    first token   one request at a time, while the other streams of `STREAMS` run through the orchestrator
    events        events of paced streams for each second of the orchestrator's CPU time, so for one core that does
                  nothing else; and what passes when the engine sends as fast as it can
    requests      tiny requests that are not streamed
    TLS           the first token through an orchestrator that reaches the engine by its agent's TLS door (door.py)

Requests go to the engine, the orchestrator, and nginx as a plain proxy of the engine in turn, so that what else the
machine does meets all alike.  The checks of the instrument: a second run of the engine adds nothing, an engine that
waits 5 ms adds 5 ms, and every event that was asked for has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import yaml

from pipeline import procfs
from pipeline.config.schema import DEMO_MODEL
from pipeline.coordination.interface import Change
from pipeline.coordination.sqlite_store import SqliteStore
from pipeline.fleet.records import AgentRecord, agent_key, encode
from pipeline.runtime.process import die_with_parent
from starling.bench.connection import Sender, Target
from starling.bench.load import closed_loop, drive
from starling.bench.response import ClientRequest, Response
from starling.fleet_certificates import issue, make_authority
from tools.bench.fleet.door import tls_files
from tools.bench.fleet.stand_in import AGENT
from tools.bench.http.server_under_test import ROOT
from tools.ports import free_port

STREAMS = (1, 16, 64)
PAUSE_MS = 20  # between two events of a stream under load: 50 tokens/s each
SETTLE_S = 1.0  # for these streams to begin
DELAY_MS = 5  # of the check
EVENTS = 400  # of a stream whose CPU time is measured
TINY_CLIENTS = 16
TLS = "orchestrator, TLS door"
NGINX = "/usr/sbin/nginx"
_NGINX_CONFIG = """
daemon off; worker_processes 1; pid {home}/nginx.pid; error_log /dev/null;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {home}/b; proxy_temp_path {home}/p;
  fastcgi_temp_path {home}/f; uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
  keepalive_requests 1000000;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


class Front:
    """The stand-in, the orchestrator, and nginx where it is installed. A context manager."""

    def __init__(self, *, has_nginx: bool = Path(NGINX).exists()) -> None:
        self._has_nginx = has_nginx
        self._stack = contextlib.ExitStack()
        self.targets: dict[str, tuple[str, int]] = {}
        self.orchestrator = 0  # pid
        self.tls: tuple[str, int] = ("", 0)  # an orchestrator that reaches the engine by a door

    def __enter__(self) -> Front:
        with self._stack:
            home = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="starling-forwarding-")))
            (home / "starling.yaml").write_text(yaml.safe_dump({"models": [{"name": DEMO_MODEL}]}))
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("STARLING_", "LLM_ENGINE_"))}
            environment |= {"STARLING_HOME": str(home), "STARLING_CONFIG": str(home / "starling.yaml")}
            engine = self._start([sys.executable, "-m", "tools.bench.fleet.stand_in"], environment)
            port = int(_line(engine, ""))
            self._register(home, f"http://127.0.0.1:{port}")
            orchestrator, front = self._start_orchestrator(environment)
            self.orchestrator = orchestrator.pid
            self.tls = ("127.0.0.1", self._start_door(home, port, environment))
            self.targets = {"engine": ("127.0.0.1", port), "orchestrator": ("127.0.0.1", front)}
            if self._has_nginx:
                proxy = free_port()
                (home / "nginx.conf").write_text(_NGINX_CONFIG.format(home=home, engine=port, port=proxy))
                self._start([NGINX, "-c", str(home / "nginx.conf")], environment)
                self.targets["nginx"] = ("127.0.0.1", proxy)
            for target in (*self.targets.values(), self.tls):
                self._wait(target)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        self._stack.callback(_end, process)
        return process

    def _start_orchestrator(self, environment: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
        """The process and its port."""
        process = self._start([sys.executable, "-m", "starling", "orchestrator", "--port", "0"], environment)
        return process, int(_line(process, "Orchestrator is ready").rpartition(":")[2])

    def _start_door(self, home: Path, engine: int, environment: dict[str, str]) -> int:
        """A door of the engine, and an orchestrator that uses it; its port."""
        second = home / "tls"
        make_authority(second, 2)
        issue(second, second, "agent", AGENT, 1)
        issue(second, second, "orchestrator", "front", 1)
        settings = msgspec.to_builtins(tls_files(second, "front"))
        config = {"models": [{"name": DEMO_MODEL}], "fleet": {"tls": settings}}
        (second / "starling.yaml").write_text(yaml.safe_dump(config))
        environment = {**environment, "STARLING_HOME": str(second), "STARLING_CONFIG": str(second / "starling.yaml")}
        command = [sys.executable, "-m", "tools.bench.fleet.door", str(engine), str(second)]
        self._register(second, f"https://127.0.0.1:{int(_line(self._start(command, environment), ''))}")
        return self._start_orchestrator(environment)[1]

    @staticmethod
    def _register(home: Path, url: str) -> None:
        record = AgentRecord(agent_id=AGENT, url=url, incarnation="1", tls_url=url if url.startswith("https") else "")

        async def put() -> None:
            async with SqliteStore(home / "fleet.db") as store:
                await store.transact((), (Change(agent_key(AGENT), encode(record)),))

        asyncio.run(put())

    @staticmethod
    def _wait(target: tuple[str, int]) -> None:
        deadline = time.monotonic() + 60.0
        while True:
            with contextlib.suppress(OSError):
                (response,) = drive(target, [[request(1)]]).responses
                if response.is_good:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{target} does not answer")
            time.sleep(0.05)


def _line(process: subprocess.Popen[str], begin: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begin):
            return line
    raise RuntimeError(f"{process.args!r} has ended")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def request(n_events: int, delay_ms: float = 0, pause_ms: float = 0, *, is_stream: bool = True) -> ClientRequest:
    """A request to the stand-in."""
    body = {"model": DEMO_MODEL, "prompt": "The old lighthouse keeper", "max_tokens": n_events}
    return ClientRequest({**body, "stream": is_stream, "user": f"{delay_ms} {pause_ms}"})


def percentiles(values: list[float]) -> dict[str, float]:
    """In ms, of seconds."""
    ordered = sorted(values)
    return {
        "p50": round(1000 * statistics.median(ordered), 2),
        "p99": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
    }


async def _first_tokens(front: Front, way: str, n_streams: int, rounds: int) -> dict[str, list[float]]:
    """Times to the first token, s, by side, while `n_streams` - 1 other streams run through the side `way`."""
    sides = {**front.targets, "engine again": front.targets["engine"], "engine + 5 ms": front.targets["engine"]}
    if way == TLS:
        sides = {"engine": front.targets["engine"], TLS: front.tls, "engine again": front.targets["engine"]}
    found: dict[str, list[float]] = {side: [] for side in sides}
    async with contextlib.AsyncExitStack() as stack:
        senders = {side: await stack.enter_async_context(Sender(Target(*target))) for side, target in sides.items()}
        crowd = await stack.enter_async_context(Sender(Target(*sides[way]), max_unparsed=1 << 20))

        def endless() -> Iterator[ClientRequest]:
            while True:
                yield request(200, pause_ms=PAUSE_MS)

        crowd_runs = closed_loop(crowd, [endless() for _ in range(n_streams - 1)])
        background = asyncio.get_running_loop().create_task(crowd_runs)
        await asyncio.sleep(SETTLE_S if n_streams > 1 else 0)
        for number in range(-10, rounds):
            for side, sender in senders.items():
                response = await sender.send(request(2, DELAY_MS if side == "engine + 5 ms" else 0))
                _check(side, response)
                if number >= 0:
                    found[side].append(response.first_s)
        background.cancel()
        await asyncio.wait([background])
    return found


def _check(side: str, response: Response) -> None:
    response.parse()
    if not response.is_good:
        raise RuntimeError(f"{side}: {response.error or response.status}")


def first_tokens(front: Front, rounds: int, ways: tuple[str, ...] = ("orchestrator", TLS)) -> dict[str, Any]:
    """By the number of streams, and by the way of these streams. Each way has its rounds in two parts, in turns."""
    found: dict[str, Any] = {}
    for n_streams in STREAMS:
        parts = [(way, uvloop.run(_first_tokens(front, way, n_streams, -(-rounds // 2)))) for way in ways * 2]
        found[str(n_streams)] = {way: _added([times for one, times in parts if one == way]) for way in ways}
    return found


def _added(parts: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Times to the first token by side, ms, and what they exceed the engine's by."""
    times = {side: [value for part in parts for value in part[side]] for side in parts[0]}
    figures = {side: percentiles(values) for side, values in times.items()}
    added = {
        side: {share: round(figures[side][share] - figures["engine"][share], 2) for share in ("p50", "p99")}
        for side in figures
        if side != "engine"
    }
    return {"first_token_ms": figures, "added_ms": added}


def events(front: Front) -> dict[str, Any]:
    """By the number of streams; "flood": the engine sends as fast as it can."""
    found: dict[str, Any] = {}
    for n_streams, pause_ms in (*((count, 10) for count in STREAMS), (64, 0)):
        clients = [[request(EVENTS, pause_ms=pause_ms)] for _ in range(n_streams)]
        before = procfs.cpu_s(front.orchestrator)
        run = drive(front.targets["orchestrator"], clients)
        used_s = procfs.cpu_s(front.orchestrator) - before
        n_events = 0
        for response in run.responses:
            _check("orchestrator", response)
            n_events += len(response.times)
        if n_events != n_streams * EVENTS:
            raise RuntimeError(f"{n_events} events have come, and {n_streams * EVENTS} were sent")
        found[str(n_streams) if pause_ms else "flood"] = {
            "events": n_events,
            "events_per_cpu_s": round(n_events / max(used_s, 0.01)),
            "events_per_s": round(n_events / run.seconds),
        }
    return found


def tiny_requests(front: Front, n_requests: int) -> dict[str, Any]:
    """Requests/s by side, and the orchestrator's CPU time for one."""
    found: dict[str, Any] = {}
    per_client = max(1, n_requests // TINY_CLIENTS)
    for side, target in front.targets.items():
        clients = [[request(1, is_stream=False)] * per_client for _ in range(TINY_CLIENTS)]
        before = procfs.cpu_s(front.orchestrator)
        run = drive(target, clients)
        used_s = procfs.cpu_s(front.orchestrator) - before
        if any(response.status != 200 for response in run.responses):
            raise RuntimeError(f"{side}: {next(one.error for one in run.responses if one.status != 200)}")
        found[side] = {"requests_per_s": round(len(run.responses) / run.seconds)}
        if side == "orchestrator":
            found[side]["cpu_ms_per_request"] = round(1000 * used_s / len(run.responses), 3)
    return found


def measure(rounds: int) -> dict[str, Any]:
    """All figures."""
    with Front() as front:
        return {
            "first_token": first_tokens(front, rounds),
            "events": events(front),
            "tiny_requests": tiny_requests(front, 100 * rounds),
        }
