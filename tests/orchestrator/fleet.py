"""A fleet for tests: engines that are real gateways, agents that speak the agents' API, and a real orchestrator.

The gateways' peers are scripted (tests/gateway/server.py): each engine gives the same answer to the same request, and a
test decides when an engine makes its next tokens.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pipeline.api.error_response import error_response
from pipeline.config.load import load
from pipeline.coordination.address import open_store
from pipeline.coordination.interface import Change, CoordinationStore, Item
from pipeline.errors import Conflict, NotOnThisHost, ResourceError, StarlingError
from pipeline.fleet import bodies, token
from pipeline.fleet.records import AgentRecord, agent_key, encode
from shm.pages import NUMERICS
from tests.gateway.http_client import HttpClient
from tests.gateway.peers import MODEL
from tests.gateway.server import Server
from tests.warm_programs import WarmProgram

DIGEST = "ab" * 32
START_S = 120.0
POLL_S = 0.02  # between two looks at the fleet's state, which take some ms of both processes


class TestAgent:
    """An agent: its state is what the test sets."""

    __test__ = False

    def __init__(self, name: str, secret: str) -> None:
        self.name = name
        self.incarnation = "1"
        self.engines: dict[str, Server] = {}
        self.cold: dict[str, Server] = {}  # engines that /load_model makes ready
        self.loads: list[str] = []
        self.digests: list[str] = []  # that the requests to load models name
        self.withdrawn: set[str] = set()  # models whose engines get no more requests, until they are loaded again
        self.may_load = threading.Event()
        self.loading = threading.Event()
        self.unloads: list[str] = []
        self.running: dict[str, int] = {}  # sequences by model
        self.sessions = 0  # of each engine
        self.moving = 0  # likewise
        self.memory = 1000  # models for which there is memory
        self.max_models = 0  # 0: any number
        self.refused: set[str] = set()  # models for which the host is too small
        self.available: Callable[[], float] = lambda: 1.0  # part of the memory
        self.is_silent = False
        self.is_extended = False  # the last poll asked it to serve on without the store
        self.polls = 0
        agent = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if agent.is_silent:
                    self.close_connection = True
                    return
                token.check(self.headers.get("Authorization"), secret)
                status = 200
                try:
                    body = agent.answer(self.path, given)
                except StarlingError as error:
                    shown = error_response(error)
                    status, body = shown.status, shown.body
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, body: bytes) -> bytes:
        if path == "/heartbeat":
            self.is_extended = msgspec.json.decode(body, type=bodies.HeartbeatRequest).extend_lease
            self.polls += 1
            return msgspec.json.encode(self.heartbeat())
        if path == "/unload_model":
            unload = msgspec.json.decode(body, type=bodies.UnloadModelRequest)
            if unload.only_idle and self.running.get(unload.model_id):
                raise Conflict(f"{unload.model_id!r} has requests", "only_idle")
            self.unloads.append(unload.model_id)
            del self.engines[unload.model_id]
            return msgspec.json.encode(bodies.UnloadModelResponse(status="success", model_id=unload.model_id))
        assert path == "/load_model", path
        load = msgspec.json.decode(body, type=bodies.LoadModelRequest)
        model = load.model_id
        self.digests.append(load.digest)
        self.loads.append(model)
        if model in self.refused:
            raise NotOnThisHost(f"{model!r} needs more memory than this host has", "model_id")
        if len(self.engines) >= min(self.memory, self.max_models or self.memory):
            raise ResourceError(f"{model!r} needs more memory: unload a model", "model_id")
        self.loading.set()
        assert self.may_load.wait(60)
        self.engines[model] = self.cold[model]
        self.withdrawn.discard(model)
        return msgspec.json.encode(bodies.LoadModelResponse(status="success", model_id=model, model_state="READY"))

    def heartbeat(self) -> bodies.HeartbeatResponse:
        models = [
            bodies.LoadedModel(
                model_id=model,
                model_state="DOWNLOADING" if model in self.withdrawn else "READY",
                cache_level="CPU_RESIDENT",
                engine_url=f"http://127.0.0.1:{engine.port}",
                engine_incarnation=str(engine.port),
                digest=DIGEST,
                kv_type="f16",
                numerics=NUMERICS,
                can_continue=True,
                takes_conversations=True,
                running=self.running.get(model, 0),
                sessions=self.sessions,
                sessions_moving=self.moving,
            )
            for model, engine in list(self.engines.items())
        ]
        files = [
            bodies.CachedModel(digest=DIGEST, names=(model,), cache_level="NVME_CACHED", bytes=1, is_complete=True)
            for model in self.cold
        ]
        return bodies.HeartbeatResponse(
            agent_id=self.name,
            incarnation=self.incarnation,
            state="IDLE",
            memory_available=self.available(),
            max_models=self.max_models,
            loaded_models=tuple(models),
            cached_models=tuple(files),
        )

    def close(self) -> None:
        self.may_load.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Fleet(HttpClient):
    """An orchestrator's process and its agents. `post`, `get` and `stream` are those of a client."""

    def __init__(
        self,
        home: Path,
        sections: dict[str, Any] | None = None,
        fleet: dict[str, Any] | None = None,
        *,
        is_forked: bool = True,
        **bounds: Any,
    ) -> None:
        """`sections`: of the configuration. `fleet`: keys of that section; `bounds`: of its `orchestrator`.

        `is_forked`: its process is a fork (warm_programs.py), else a new program.
        """
        self._is_forked = is_forked
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home = home
        self.secret = token.load_or_create(home / "fleet-token")
        fleet = fleet or {}
        config = {
            "fleet": {**fleet, "orchestrator": {"poll_ms": 50, **fleet.get("orchestrator", {}), **bounds}},
            "logging": {"format": "json"},
            **(sections or {}),
        }
        (home / "starling.yaml").write_text(yaml.safe_dump(config))
        self.agents: dict[str, TestAgent] = {}
        self.lines: list[str] = []
        self.port = 0
        self._start()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STARLING_")}
        environment |= {"STARLING_HOME": str(self.home), "STARLING_CONFIG": str(self.home / "starling.yaml")}
        arguments = ["starling", "orchestrator", "--port", "0"]
        self.process: WarmProgram | subprocess.Popen[str]
        if self._is_forked:
            self.process = WarmProgram(arguments, environment)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        ready: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self.process, ready), daemon=True)
        self._reader.start()
        line = ready.get(timeout=START_S)
        assert line, "".join(self.lines)
        self.port = int(line.rpartition(":")[2])

    def _read(self, process: WarmProgram | subprocess.Popen[str], ready: queue.SimpleQueue[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.lines.append(line)
                if line.startswith("Orchestrator is ready"):
                    ready.put(line.strip())
        ready.put("")

    def restart(self) -> None:
        """Start the orchestrator again, on another port."""
        self._reader.join()
        self._start()

    def fleet_events(self) -> list[dict[str, Any]]:
        answer = self.get("/v1/fleet/events", token.authorization(self.secret))
        found: list[dict[str, Any]] = answer.json["events"]
        return found

    def close(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join()
        for agent in self.agents.values():
            agent.close()
        return code

    # ---------------------------------------------------------------- agents

    def write(self, key: str, value: bytes | None) -> None:
        """Write into the coordination store."""

        async def put() -> None:
            async with self.open_store() as store:
                await store.transact((), (Change(key, value),))

        asyncio.run(put())

    def items(self, prefix: str) -> list[Item]:
        """What the coordination store has."""

        async def read() -> list[Item]:
            async with self.open_store() as store:
                return (await store.scan(prefix))[0]

        return asyncio.run(read())

    def open_store(self) -> CoordinationStore:
        """The coordination store of the fleet."""
        environment = {"STARLING_HOME": str(self.home)}
        return open_store(load(self.home / "starling.yaml", environment), environment)

    def add_agent(self, name: str, engine: Server) -> TestAgent:
        """An agent with an engine that is ready; returns when the orchestrator lists it."""
        agent = self.agents[name] = TestAgent(name, self.secret)
        agent.engines = {MODEL: engine}
        self.register(agent)
        return agent

    def register(self, agent: TestAgent) -> None:
        record = AgentRecord(agent_id=agent.name, url=agent.url, incarnation=agent.incarnation)
        self.write(agent_key(agent.name), encode(record))
        self.wait(
            lambda state: any(one["agent_id"] == agent.name and one["health"] == "READY" for one in state["agents"])
        )

    def wait(self, holds: Any) -> dict[str, Any]:
        """Wait until the fleet's state is as wanted; returns it."""
        while not holds(state := self.state()):
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(POLL_S)
        return state

    def state(self) -> dict[str, Any]:
        answer = self.get("/v1/fleet", token.authorization(self.secret))
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found


Pair = tuple[Fleet, Fleet]  # orchestrators of one fleet
