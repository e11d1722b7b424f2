"""A real server for tests: its own home, its own ports, every stage under honcho; and a plain client.

Waits are on events: a line of the server's output, a process's pidfd, a byte of a stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.observe.status import read_all
from pipeline.procfs import children
from tests.warm_programs import WarmProgram
from tools.ports import free_port

ROOT = Path(__file__).parents[2]
START_S = 270  # kernels may have to be compiled, perhaps beside other work
STOP_S = 180
POLL_S = 0.02  # between two looks at what no event announces: one that never pauses takes a core from the server


class Server:
    """All stages under honcho with their own configuration; the server is ready when `__enter__` returns.

    honcho is that of `starling up`, a fork of a process that has imported the stages (tests/warm_programs.py), and the
    supervisors are its forks: imports are most of the CPU time of a start as new programs (`PlainServer`).
    """

    # The module that runs the Procfile, where honcho is a new program.
    honcho: tuple[str, ...] = ("starling.cli.honcho_patch", "start", "-f", str(ROOT / "Procfile"))
    is_forked = True

    def __init__(
        self,
        home: Path,
        config: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        """`launcher` is a command that runs honcho's command, for example `small_disk.mounted`."""
        self.home = home
        self.launcher = launcher
        self.port = free_port()
        settings = {**config, "server": {"port": self.port, **config.get("server", {})}}
        self.config_path = home / "starling.yaml"
        self.config_path.write_text(yaml.safe_dump(settings))
        self.environment = {
            # `make test ARGS=...` exports its arguments, which a nested `make serve` would take for its own.
            **{name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")},
            "STARLING_HOME": str(home),
            "STARLING_CONFIG": str(self.config_path),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **(environment or {}),
        }
        self.output: list[str] = []
        self._has_more = threading.Condition()  # `output` has grown
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process: WarmProgram | subprocess.Popen[str] | None = None

    def start(self) -> Server:
        if self.is_forked and not self.launcher:
            command = ["honcho", *self.honcho[1:]]
            self.process = WarmProgram(command, self.environment, ROOT, leads_session=True)
        else:
            self.process = subprocess.Popen(
                [*self.launcher, sys.executable, "-m", *self.honcho],
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._lines = queue.SimpleQueue()  # drops the output of an earlier start
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()
        return self

    def _read(self, process: WarmProgram | subprocess.Popen[str], into: queue.SimpleQueue[str | None]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._add(line)
                into.put(line)
        into.put(None)

    def _add(self, line: str) -> None:
        with self._has_more:
            self.output.append(line)
            self._has_more.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Wait for the next line of output that matches. Fails, with the output, after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line matched {pattern!r}:\n" + "".join(self.output[-80:]))
            if match := re.search(pattern, line):
                return match

    def wait_output(self, *texts: str, since: int = 0) -> None:
        """Wait until a line of the output, from line `since` on, contains all `texts`.

        What a stage logs may arrive after what it answers: honcho reads the lines of all stages.
        """

        def is_there() -> bool:
            return any(all(text in line for text in texts) for line in self.output[since:])

        with self._has_more:
            assert self._has_more.wait_for(is_there, 120), f"no line has {texts}:\n" + "".join(self.output[-80:])

    def wait_ready(self) -> Server:
        self.wait_for(rf"http://127\.0\.0\.1:{self.port}")
        return self

    def wait_recorded(self) -> None:
        """Wait until each stage has recorded that it is ready, as `starling status` shows it: a moment after it is.

        Until then the record of a stage that was killed says that this one was ready.
        """
        run = self.home / "run"
        poll_until(lambda: all(one.ready and one.alive for one in read_all(run)), lambda: read_all(run))

    def __enter__(self) -> Server:
        try:
            return self.start().wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Signal the foreground process group, as a terminal does, and wait for honcho's end. Returns its exit code."""
        process = self.process
        if process is None:
            return 0
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            try:
                process.wait(STOP_S)
            except (TimeoutError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise AssertionError("the server did not stop:\n" + "".join(self.output[-60:])) from None
        return process.returncode

    # -------------------------------------------------------------- processes and leftovers

    def pids(self) -> dict[int, str]:
        """Pid and command of every live process whose environment has this server's home."""
        mark = f"STARLING_HOME={self.home}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def kill_all(self) -> None:
        """Kill all processes like a power cut that keeps the memory. They are stopped first, so that none cleans up."""
        stopped: set[int] = set()
        while new := self.pids().keys() - stopped:  # one may have forked before it was stopped
            stopped |= new
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert all(wait_gone(pid) for pid in stopped)

    def pid_of(self, name: str, timeout_s: float = 60) -> int:
        """The live process of a stage ("kv"), or of a rank of a worker ("worker-NAME/1"); waits for one
        that is being started anew, as a stage that a test has just hit may be."""
        stage, _, rank = name.partition("/")
        deadline = time.monotonic() + timeout_s
        while True:
            for record in read_all(self.home / "run"):
                if record.stage != stage or not record.alive or wait_gone(record.pid, 0):
                    continue
                if not rank:
                    return record.pid
                if len(ranks := children(record.pid)) >= int(rank):
                    return ranks[int(rank) - 1]
            assert time.monotonic() < deadline, f"no live {name} in {timeout_s} s:\n" + "".join(self.output[-40:])
            time.sleep(POLL_S)

    @property
    def arenas(self) -> Path:
        """The directory of this server's arenas."""
        run = os.fsencode(os.path.realpath(self.home / "run"))
        return Path("/dev/shm") / f"starling-{os.getuid()}-{hashlib.sha256(run).hexdigest()[:12]}"

    def leftovers(self) -> list[str]:
        """Sockets in the run directory and arenas that name this server."""
        run, arenas = self.home / "run", self.arenas
        left = [str(p) for p in run.glob("*.sock")] if run.exists() else []
        return left + ([str(p) for p in arenas.rglob("*")] if arenas.exists() else [])

    # -------------------------------------------------------------- HTTP

    def connect(self, timeout_s: float = 120) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request. Returns the status, the decoded JSON (or the text), and the headers."""
        connection = self.connect() if timeout_s is None else self.connect(timeout_s)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            raw = response.read()
            kind = response.getheader("Content-Type", "")
            parsed = json.loads(raw) if raw and "json" in kind else raw.decode("utf-8", "replace")  # HEAD has no body
            return response.status, parsed, dict(response.getheaders())
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Any:
        """POST a request that must succeed; return the decoded body."""
        status, answer, _ = self.request("POST", path, body)
        assert status == 200, (status, answer)
        return answer

    def metrics(self, name: str) -> dict[str, float]:
        """Values of a metric by the text of their labels ("" for none). Those of other stages are up to 1 s old."""
        status, text, _ = self.request("GET", "/metrics")
        assert status == 200
        lines = [line.removeprefix(name) for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return {labels.strip("{}"): float(value) for labels, _, value in (line.rpartition(" ") for line in lines)}

    def wait_metrics(self, name: str, holds: Callable[[dict[str, float]], bool], timeout_s: float = 120) -> None:
        """Wait until `holds` is true of a metric. Stages publish their metrics once per second."""
        deadline = time.monotonic() + timeout_s
        while not holds(found := self.metrics(name)):
            assert time.monotonic() < deadline, (name, found)
            time.sleep(POLL_S)

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """Decoded `data:` events until `[DONE]` or the end of the body."""
        connection = self.connect()
        try:
            connection.request(
                "POST", path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            assert response.status == 200, (response.status, response.read())
            while line := response.readline():
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)
        finally:
            connection.close()


def poll_until(holds: Callable[[], object], explain: Callable[[], object] = str, timeout_s: float = 120) -> None:
    """Wait until `holds()` is true of what no event announces. Fails with `explain()` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, explain()
        time.sleep(POLL_S)


class PlainServer(Server):
    """A server that `honcho start` starts, without anything of the project around it."""

    is_forked = False
    honcho = ("honcho", "--no-colour", "start")


def wait_gone(pid: int, timeout_s: float = STOP_S) -> bool:
    """Wait for the end of a process. False if it still runs after `timeout_s`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)
