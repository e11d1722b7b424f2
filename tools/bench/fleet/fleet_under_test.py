"""The fleet under test: `starling fleet up` on free ports of 127.0.0.1, with the demo model on all its agents."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL
from pipeline.fleet import token
from pipeline.runtime.process import die_with_parent
from tools.bench.http.server_under_test import ROOT
from tools.ports import free_port

START_S = 300.0  # kernels may have to be compiled
STOP_S = 30.0
POLL_S = 0.05


class Engine(NamedTuple):
    """One agent's engine."""

    agent: str
    address: tuple[str, int]
    key: str


class FleetUnderTest:
    """An orchestrator and agents. A context manager; all agents have the model when it is entered."""

    def __init__(self, n_agents: int, kv_cache_mb: int = 128, store: str = "", **orchestrator: Any) -> None:
        """`kv_cache_mb`: of each engine. `store`: fleet.store. `orchestrator`: its section, besides the port."""
        self.port = free_port()
        self.address = ("127.0.0.1", self.port)
        self._n_agents = n_agents
        self._folder = tempfile.TemporaryDirectory(prefix="starling-fleet-")
        self.home = Path(self._folder.name)
        for folder in (paths.cache_dir(), paths.models_dir()):
            folder.mkdir(parents=True, exist_ok=True)
            (self.home / folder.name).symlink_to(folder)
        config = {
            "models": [{"name": DEMO_MODEL, "kv_cache_mb": kv_cache_mb, "ranks": 1}],
            "fleet": {"store": store, "orchestrator": {"port": self.port, "poll_ms": 100, **orchestrator}},
        }
        (self.home / "starling.yaml").write_text(yaml.safe_dump(config))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("STARLING_", "LLM_ENGINE_"))}
        environment |= {"STARLING_HOME": str(self.home), "STARLING_CONFIG": str(self.home / "starling.yaml")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.environment = environment
        self._log = (self.home / "output").open("w+b")
        self._others: dict[tuple[str, int], subprocess.Popen[bytes]] = {}  # orchestrators, by address
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        """The process that runs the fleet."""
        count = str(self._n_agents)
        return self._spawn("starling", "fleet", "up", "--agents", count, "--replicas", count, process_group=0)

    def _spawn(self, module: str, *words: str, before: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[bytes]:
        """`python -m module words`, which ends with this process. `before`: the command that runs it."""
        return subprocess.Popen(
            [*before, sys.executable, "-m", module, *words],
            cwd=ROOT,
            env={**self.environment, **options.pop("env", {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
            **options,
        )

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fleet and remove its home."""
        others = list(self._others.values())
        for process in others:
            process.send_signal(signal.SIGINT)
        for process in others:
            _wait_for_end(process)
        self._process.send_signal(signal.SIGINT)
        _wait_for_end(self._process)
        self._log.close()
        self._folder.cleanup()

    def add_orchestrator(self, **settings: str) -> tuple[str, int]:
        """The address of another orchestrator of the same agents. `settings`: keys of fleet.orchestrator."""
        address = ("127.0.0.1", free_port())
        given = {f"STARLING_FLEET__ORCHESTRATOR__{name.upper()}": value for name, value in settings.items()}
        process = self._spawn("starling", "orchestrator", "--port", str(address[1]), env=given)
        self._others[address] = process
        self.wait_ready(address=address)
        return address

    # ---------------------------------------------------------------- its state

    def wait_ready(
        self,
        is_ready: Callable[[dict[str, Any]], bool] = lambda state: True,
        address: tuple[str, int] | None = None,
    ) -> float:
        """Wait until every agent has the model ready and `is_ready` of the state holds; the seconds that it took."""
        return self.wait_until(lambda state: bool(state) and self._is_whole(state) and is_ready(state), address)

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], address: tuple[str, int] | None = None) -> float:
        """Wait until the state at an orchestrator, {} without one, is as wanted; the seconds that it took."""
        begun = time.monotonic()
        needed = (self._process, self._others.get(address or self.address, self._process))
        while not holds(self.state(address)):
            if any(one.poll() is not None for one in needed) or time.monotonic() - begun > START_S:
                self._log.seek(0)
                raise RuntimeError("the fleet is not ready:\n" + self._log.read().decode(errors="replace")[-3000:])
            time.sleep(POLL_S)
        return time.monotonic() - begun

    def _is_whole(self, state: dict[str, Any]) -> bool:
        return len(state["agents"]) == self._n_agents and all(
            one["health"] == "READY" and any(m["cache_state"] == "READY" for m in one.get("loaded_models", ()))
            for one in state["agents"]
        )

    def state(self, address: tuple[str, int] | None = None) -> dict[str, Any]:
        """What /v1/fleet answers at an orchestrator, by default the first; {} without one."""
        try:
            found: dict[str, Any] = self._call(address or self.address, "GET", "/v1/fleet")
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        return found

    def choices(self, request_id: str) -> list[str]:
        """The agents that a request was sent to, in order."""
        found = self._call(self.address, "GET", f"/v1/fleet/why/{request_id}")["choices"]
        return [str(one["agent_id"]) for one in found]

    def why(self, request_id: str) -> str:
        """The agent that a request was sent to last."""
        return self.choices(request_id)[-1]

    def events(self) -> list[str]:
        """The kinds of the orchestrator's events, in order."""
        return [str(one["kind"]) for one in self._call(self.address, "GET", "/v1/fleet/events")["events"]]

    def engines(self) -> list[Engine]:
        """The engines, by agent, with the keys that only heartbeats show."""
        found = []
        for agent in self.state()["agents"]:
            host, _, port = agent["url"].removeprefix("http://").rpartition(":")
            (model,) = self._call((host, int(port)), "POST", "/heartbeat")["loaded_models"]
            host, _, port = model["engine_url"].removeprefix("http://").rpartition(":")
            found.append(Engine(agent["agent_id"], (host, int(port)), model["engine_key"]))
        return found

    def drain(self, agent: str) -> None:
        """Move the agent's streams elsewhere, until `uncordon`."""
        self._call(self.address, "POST", "/v1/fleet/cordon", {"agent": agent, "cordoned": True, "drain": True})

    def cordon(self, agent: str) -> None:
        """Send the agent no new requests until `uncordon`."""
        self._call(self.address, "POST", "/v1/fleet/cordon", {"agent": agent, "cordoned": True})

    def wait_cordoned(self, address: tuple[str, int], count: int) -> None:
        """Wait until an orchestrator has so many cordoned agents."""
        self.wait_ready(lambda state: sum(one["cordoned"] for one in state["agents"]) == count, address)

    def uncordon(self, agent: str) -> None:
        """Let the agent get requests again."""
        self._call(self.address, "POST", "/v1/fleet/cordon", {"agent": agent, "cordoned": False})
        self.wait_ready(lambda state: not any(one["cordoned"] for one in state["agents"] if one["agent_id"] == agent))

    def _call(self, address: tuple[str, int], method: str, path: str, content: Any = ()) -> Any:
        connection = http.client.HTTPConnection(*address, timeout=10.0)
        try:
            secret = (self.home / "fleet-token").read_text().strip()
            body = json.dumps(content or {}).encode() if method == "POST" else None
            headers = {"Content-Type": "application/json", **token.authorization(secret)}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            raw = response.read()
            if response.status != 200:
                raise ValueError(f"{path} answers with {response.status}: {raw[:300]!r}")
            return json.loads(raw)
        finally:
            connection.close()

    # ---------------------------------------------------------------- its processes

    def kill_host(self, agent: str) -> None:
        """SIGKILL to all processes of an agent's host, its engines included."""
        (pid,) = self.processes("-m starling agent", f"--id {agent} ")
        kill(self.tree(pid))

    def restore_host(self, agent: str) -> None:
        """The host is back."""  # `fleet up` has started its agent again

    @staticmethod
    def tree(pid: int) -> list[int]:
        """A process and everything below it."""
        return procfs.process_tree(pid)

    def processes(self, *words: str) -> list[int]:
        """The processes of the fleet whose command line has all words."""
        pids = self.tree(self._process.pid)
        commands = {pid: " ".join(procfs.command(pid)) for pid in pids if pid != self._process.pid}
        return [pid for pid, command in commands.items() if all(word in command for word in words)]


def kill(pids: list[int]) -> None:
    """SIGKILL at once: none of them can report the end of another one. Some may have ended."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process that was asked to end has ended; kill one that takes too long."""
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
