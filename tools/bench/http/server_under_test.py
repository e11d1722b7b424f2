"""The server under test: Starling with all its stages, on a free port of 127.0.0.1.

It has a STARLING_HOME of its own that shares models and compiled kernels.  The server that it is compared with is in
baseline.py.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.observe.status import read_all
from pipeline.runtime.process import die_with_parent
from starling.bench.response import ClientRequest
from tools.ports import free_port

ROOT = Path(__file__).parents[3]
START_S = 300.0  # the model is prepared and the kernels are compiled before
STOP_S = 20.0
CONTROL_PLANE = ("gateway", "tokenizer", "scheduler", "kv")


class ServerUnderTest:
    """`starling up` with a configuration of its own. A context manager; ready when entered."""

    name = "starling"

    def __init__(
        self,
        model: Mapping[str, Any],
        cores: list[int],
        settings: Mapping[str, Any],
        keys: Mapping[str, str],
        spill: bool = False,
    ) -> None:
        """Start the server and wait until it is ready.

        model: its entry in the configuration's `models`, without `cpus`.
        cores: the only ones that its processes may run on; it divides them among control plane and ranks itself.
        settings: further sections of the configuration.
        keys: API key by tenant; `request` uses the first tenant.
        spill: whether evicted pages go to a file.
        """
        self.keys, self._cores = dict(keys), list(cores)
        self.port = free_port()
        self.address = ("127.0.0.1", self.port)
        self.model = str(model["name"])
        self._home = tempfile.TemporaryDirectory(prefix="starling-bench-")
        home = Path(self._home.name)
        for folder in (paths.cache_dir(), paths.models_dir()):
            folder.mkdir(parents=True, exist_ok=True)
            (home / folder.name).symlink_to(folder)
        config = {
            "models": [{**model, **({"spill_path": str(home / "spill")} if spill else {})}],
            "cache": {"persist_mb": 0},
            "auth": {"api_keys": [{"key": key, "tenant": tenant} for tenant, key in keys.items()]},
            **settings,
            "server": {"port": self.port, **settings.get("server", {})},
        }
        (home / "starling.yaml").write_text(yaml.safe_dump(config))
        self.run_dir = home / "run"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("STARLING_", "LLM_ENGINE_"))}
        environment |= {"STARLING_HOME": str(home), "STARLING_CONFIG": str(home / "starling.yaml")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._log = (home / "output").open("w+b")
        self._environment = environment
        self._prepare()
        self._start()

    def _run(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "starling", command],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=functools.partial(_begin_child, os.getpid(), self._cores),
        )

    def _prepare(self) -> None:
        """Convert the model and compile the kernels: beside other work that takes many minutes, so it has no limit."""
        self._process = self._run("prepare")
        try:
            if self._process.wait():
                raise RuntimeError("the model could not be prepared:\n" + self._output())
        except BaseException:
            self.close()
            raise

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]

    def _start(self) -> None:
        self._process = self._run("up")
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start:\n" + self._output())
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        return http_get(self.address, "/ready")[0] == 200

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def request(self, body: dict[str, Any]) -> ClientRequest:
        """A request of the first tenant."""
        tenant = next(iter(self.keys), "")
        return ClientRequest(body, self.keys.get(tenant, ""), tenant)

    def stages(self) -> dict[str, list[int]]:
        """Process ids by stage, ranks with their worker."""
        records = [record for record in read_all(self.run_dir) if record.alive]
        return {record.stage: [record.pid, *procfs.children(record.pid)] for record in records}

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each stage so far; `supervisors` is that of all other processes of the server."""
        used = {stage: sum(map(exact_cpu_s, pids)) for stage, pids in self.stages().items()}
        everything = sum(map(exact_cpu_s, procfs.process_tree(self._process.pid)))
        used["supervisors"] = everything - sum(used.values())
        return used

    def _rank_pids(self) -> list[int]:
        return [pid for stage, pids in self.stages().items() if stage.startswith("worker") for pid in pids]

    def rank_cores(self) -> list[int]:
        """The cores that ranks run on; fewer than those of the server if the control plane has some alone."""
        return sorted({core for pid in self._rank_pids() for core in os.sched_getaffinity(pid)})

    def rank_waits_s(self) -> list[float]:
        """For each rank, the time in which it could run while another process had its core, so far."""
        return [core_wait_s(pid) for pid in self._rank_pids()]

    def metric(self, name: str) -> float:
        """A metric's sum over its labels; 0.0 when there is none."""
        total = 0.0
        for line in http_get(self.address, "/metrics")[1].splitlines():
            if line.startswith(name) and line[len(name)] in " {":
                total += float(line.rsplit(" ", 1)[1])
        return total

    @property
    def pids(self) -> list[int]:
        """All processes of the server."""
        return procfs.process_tree(self._process.pid)

    @property
    def arena_dir(self) -> Path:
        """Where its arenas are."""
        return paths.arena_dir(Config(), self._environment)

    def kill_and_start(self, between: Callable[[], object] = lambda: None) -> float:
        """Send SIGKILL to every process at once and start again; returns the seconds until it is ready.

        between: called when all have ended.
        """
        pids = self.pids
        fds = [os.pidfd_open(pid) for pid in pids]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for fd in fds:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
        for fd in fds:
            select.select([fd], [], [], STOP_S)
            os.close(fd)
        self._process.wait(STOP_S)
        between()
        begun = time.perf_counter()
        self._start()
        return time.perf_counter() - begun

    def stop_and_start(self) -> None:
        """Stop the server in an orderly way, read nothing of its state from memory, and start it again."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(STOP_S)
        for file in (Path(self._home.name) / "state").rglob("*"):
            if file.is_file():
                drop_from_cache(file)
        self._start()

    def close(self) -> None:
        """Stop the server, which removes its arenas. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # every stage dies with its parent
                self._process.wait()
        if not self._log.closed:
            self._log.close()
            self._home.cleanup()


def _begin_child(parent: int, cores: list[int]) -> None:
    die_with_parent(parent)
    os.sched_setaffinity(0, cores)


def drop_from_cache(path: Path) -> None:
    """Remove a file from the operating system's page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def exact_cpu_s(pid: int) -> float:
    """CPU time of a process to the nanosecond, as the scheduler counts it; 0.0 when it is gone."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(task.read_text().split()[0])
    return total / 1e9


def core_wait_s(pid: int) -> float:
    """Time in which the main thread of a process could run and waited for a core, as the scheduler counts it."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


def http_get(address: tuple[str, int], path: str) -> tuple[int, str]:
    """Status and text; (0, "") when no server responds."""
    connection = http.client.HTTPConnection(*address, timeout=10.0)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return 0, ""
