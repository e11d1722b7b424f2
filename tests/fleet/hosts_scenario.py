"""Two agents, an orchestrator and etcd on hosts of their own, whose links and store fail: a program for test_hosts.py.

A host is a network namespace with a link to one bridge; all of them are in namespaces that end with this program.
A client on the orchestrator's host reads streams of the demo model.  The last line is a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.config.schema import DEMO_MODEL
from tools.bench.fleet.deaths import plain

NETWORK = "10.77.0"
HOSTS = {"etcd": 2, "front": 3, "one": 11, "two": 12}
AGENTS = ("one", "two")
LEASE_S, SILENT_S = 4.0, 3.0
WAIT_S = 240.0
POLL_S = 0.05
BODY = {"model": DEMO_MODEL, "prompt": "The old lighthouse keeper climbed", "seed": 7, "ignore_eos": True}
N_TOKENS = 400
KILL_AFTER = 30  # events


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def address(host: str) -> str:
    return f"{NETWORK}.{HOSTS[host]}"


def connect_hosts() -> None:
    run("mount", "-t", "tmpfs", "tmpfs", "/run")  # where `ip netns` keeps names
    run("ip", "link", "add", "bridge", "type", "bridge")
    run("ip", "link", "set", "bridge", "up")
    for host in HOSTS:
        run("ip", "netns", "add", host)
        run("ip", "link", "add", f"to-{host}", "type", "veth", "peer", "name", "eth0", "netns", host)
        run("ip", "link", "set", f"to-{host}", "master", "bridge", "up")
        run("ip", "-n", host, "addr", "add", f"{address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", host, "link", "set", device, "up")


def set_link(host: str, state: str) -> None:
    run("ip", "link", "set", f"to-{host}", state)


class Host:
    """The processes of one host, and requests that are sent on it."""

    def __init__(self, folder: Path, host: str, **settings: str) -> None:
        self.host = host
        self._log = folder / f"{host}.log"
        store = f"etcd://{address('etcd')}:2379"
        self._env = {**os.environ, "STARLING_HOME": str(folder), "STARLING_FLEET__STORE": store, **settings}

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            words = ["ip", "netns", "exec", self.host, *command]
            return subprocess.Popen(words, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def fetch(self, url: str, token: str, body: Any = None, timeout_s: float = 60.0) -> tuple[int, Any]:
        """A request from this host: status and decoded body. Status 0: no answer."""
        words = ["ip", "netns", "exec", self.host, "curl", "--silent", "--max-time", str(timeout_s), url]
        words += ["--header", f"Authorization: Bearer {token}", "--write-out", "\n%{http_code}"]
        if body is not None:
            words += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
        text, _, status = subprocess.run(words, capture_output=True, text=True).stdout.rpartition("\n")
        return int(status or 0), json.loads(text) if text else None


class Stream:
    """A stream that a client on the orchestrator's host reads."""

    def __init__(self, url: str, token: str) -> None:
        words = ["ip", "netns", "exec", "front", "curl", "--silent", "--no-buffer", "--dump-header", "-", url]
        words += ["--header", "Content-Type: application/json", "--header", f"Authorization: Bearer {token}"]
        words += ["--data", json.dumps({**BODY, "stream": True, "max_tokens": N_TOKENS})]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.name = ""
        self.events: list[str] = []
        self.pause_s = 0.0
        self._last = time.monotonic()

    def event(self) -> bool:
        """Wait for the next event; False at the end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.lower().startswith("x-starling-request:"):
                self.name = line.partition(":")[2].strip()
            if line.startswith("data: "):
                now = time.monotonic()
                self.pause_s, self._last = max(self.pause_s, now - self._last), now
                self.events.append(line[6:].strip())
                return True
        return False

    def begin(self) -> None:
        for _ in range(KILL_AFTER):
            assert self.event(), self.events
        self.pause_s = 0.0

    def rest(self) -> list[str]:
        while self.event():
            pass
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return plain(self.events)


class Scenario:
    """The fleet and what happens to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = "http://127.0.0.1:8081"
        self.front = Host(folder, "front")
        self.agents = {name: Host(folder, name, STARLING_FLEET__AGENT__HOST=address(name)) for name in AGENTS}
        self.token = ""
        self.running: list[subprocess.Popen[bytes]] = []
        self.etcd: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ the fleet

    def start_etcd(self) -> None:
        client, peer = f"http://{address('etcd')}:2379", "http://127.0.0.1:2380"
        self.etcd = Host(self.folder, "etcd").start(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )

    def start(self) -> None:
        self.start_etcd()
        starling = (sys.executable, "-m", "starling")
        self.running.append(self.front.start(*starling, "orchestrator"))
        for name, host in self.agents.items():
            self.running.append(host.start(*starling, "agent", "--id", name))
        self.until("the token", lambda: (self.folder / "fleet-token").is_file())
        self.token = (self.folder / "fleet-token").read_text().strip()
        self.until("two agents", lambda: len(self.healthy()) == 2)
        assert self.change("place", model=DEMO_MODEL, replicas=2)[0] == 200
        self.until("two engines", lambda: len(self.ready()) == 2)

    def stop(self) -> None:
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait()
        if self.etcd is not None:
            self.etcd.kill()
            self.etcd.wait()

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not (found := holds()):
            assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}: {self.state()}"
            time.sleep(POLL_S)
        print(f"{time.monotonic():.1f} {what}", flush=True)
        return found

    def state(self) -> dict[str, Any]:
        status, state = self.front.fetch(self.url + "/v1/fleet", self.token)
        return state if status == 200 else {"agents": [], "store": "unknown"}

    def change(self, op: str, **fields: Any) -> tuple[int, Any]:
        return self.front.fetch(f"{self.url}/v1/fleet/{op}", self.token, fields)

    def healthy(self) -> list[dict[str, Any]]:
        return [one for one in self.state()["agents"] if one["health"] == "READY"]

    def ready(self) -> list[str]:
        found = [one for one in self.healthy() if one["state"] != "DEGRADED" and not one["cordoned"]]
        return [o["agent_id"] for o in found if any(m["cache_state"] == "READY" for m in o["loaded_models"])]

    def why(self, name: str) -> str:
        status, found = self.front.fetch(f"{self.url}/v1/fleet/why/{name}", self.token)
        assert status == 200, found
        return str(found["choices"][-1]["agent_id"])

    def answer(self) -> Any:
        status, found = self.front.fetch(self.url + "/v1/completions", self.token, {**BODY, "max_tokens": 8})
        assert status == 200, found
        return found["choices"]

    def events(self) -> list[dict[str, Any]]:
        status, found = self.front.fetch(self.url + "/v1/fleet/events", self.token)
        assert status == 200, found
        return list(found["events"])

    def left(self) -> int:
        return sum(one["kind"] == "agent-left" for one in self.events())

    @contextlib.contextmanager
    def stream(self) -> Iterator[Stream]:
        stream = Stream(self.url + "/v1/completions", self.token)
        stream.begin()
        yield stream

    # ------------------------------------------------------------------ what happens

    def store_dies(self, whole: list[str]) -> None:
        """A stream, routing and both agents outlast the store by several leases."""
        assert self.etcd is not None
        expected, left = self.answer(), self.left()
        with self.stream() as stream:
            self.etcd.kill()
            self.etcd.wait()
            assert stream.rest() == whole
        self.until("the store is down", lambda: self.state()["store"] == "down")
        until = time.monotonic() + 3 * LEASE_S
        while time.monotonic() < until:
            assert self.answer() == expected
            assert len(self.healthy()) == 2
        for name, host in self.agents.items():
            url = next(one["url"] for one in self.state()["agents"] if one["agent_id"] == name)
            status, report = host.fetch(url + "/heartbeat", self.token, {})
            assert status == 200 and report["lease_s"] > 0, report
        self.start_etcd()
        self.until("the store is back", lambda: self.state()["store"] == "up")
        self.until("two agents are registered", lambda: len(self.ready()) == 2)
        assert self.left() == left

    def host_is_silent(self, whole: list[str]) -> float:
        """Its stream goes on elsewhere; it serves no more before its lease is over, and joins again."""
        expected, left = self.answer(), self.left()
        with self.stream() as stream:
            silent = self.why(stream.name)
            state = next(one for one in self.state()["agents"] if one["agent_id"] == silent)
            status, report = self.agents[silent].fetch(state["url"] + "/heartbeat", self.token, {})
            assert status == 200
            (engine,) = report["loaded_models"]
            set_link(silent, "down")
            moved = stream.rest()
            assert moved == whole
            assert self.why(stream.name) != silent
        self.until("the store has ended its lease", lambda: self.left() > left)
        # The link's end that the agent listens on is up: processes of its own host still reach it.
        request = {**BODY, "max_tokens": 4}
        refused = self.agents[silent].fetch(state["url"] + "/infer", self.token, request)
        assert refused[0] == 503 and "lease has ended" in refused[1]["error"]["message"], refused
        refused = self.agents[silent].fetch(engine["engine_url"] + "/v1/completions", engine["engine_key"], request)
        assert refused[0] == 503, refused
        assert self.answer() == expected
        set_link(silent, "up")
        self.until("the silent host is back", lambda: silent in self.ready())
        other = next(name for name in AGENTS if name != silent)
        assert self.change("cordon", agent=other, cordoned=True)[0] == 200
        self.until("the other one is cordoned", lambda: other not in self.ready())
        assert self.answer() == expected
        assert self.change("cordon", agent=other, cordoned=False)[0] == 200
        self.until("both serve", lambda: len(self.ready()) == 2)
        return stream.pause_s


def main(folder: Path) -> None:
    connect_hosts()
    scenario = Scenario(folder)
    try:
        scenario.start()
        with scenario.stream() as stream:
            whole = stream.rest()
        undisturbed_s = stream.pause_s
        scenario.store_dies(whole)
        pauses = [round(scenario.host_is_silent(whole), 3) for _ in range(int(os.environ.get("ROUNDS", "1")))]
        print(json.dumps({"silent_pauses_s": pauses, "undisturbed_s": round(undisturbed_s, 3)}))
    finally:
        scenario.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
