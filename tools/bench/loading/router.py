"""The baseline of loads on demand: llama-server as a router, which starts a process for the model of a request."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.runtime.process import die_with_parent
from tools.bench.http.baseline import LOAD_S, BaselineMissing, ServerProcess, native_server
from tools.bench.http.server_under_test import STOP_S, http_get
from tools.ports import free_port


class RouterServer(ServerProcess):
    """llama-server with `--models-dir`. A context manager; ready when entered.

    Its own choices for slots, batches and warm-up hold.  The context is bounded: KV memory for the whole context of
    a large model would be most of what a load does.  Raises `BaselineMissing`.
    """

    name = "llama-server"

    def __init__(self, model: Path, cores: list[int], context: int) -> None:
        binary = native_server()
        if binary is None:
            raise BaselineMissing("llama-server is not installed: make peers-native compiles it")
        self.model = model.stem
        self.address = ("127.0.0.1", free_port())
        self._directory = tempfile.TemporaryDirectory(prefix="llama-server-")
        home = Path(self._directory.name)
        (home / "models").mkdir()
        (home / "models" / model.name).symlink_to(model.resolve())
        threads = str(len(cores))
        command = [str(binary), "--models-dir", str(home / "models"), "--host", "127.0.0.1"]
        command += ["--port", str(self.address[1]), "--threads", threads, "--threads-batch", threads]
        command += ["--ctx-size", str(context), "--offline"]
        parent = os.getpid()

        def begin() -> None:
            die_with_parent(parent)
            os.sched_setaffinity(0, set(cores))

        self._log = home / "output"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=home, preexec_fn=begin
            )
        try:
            self._wait(functools.partial(http_get, self.address, "/health"))
        except BaseException:
            self.close()
            raise

    def _wait(self, get: Any) -> None:
        deadline = time.monotonic() + LOAD_S
        while get()[0] != 200:
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace").splitlines()[-5:]
                raise BaselineMissing("llama-server does not run as a router:\n" + "\n".join(tail))
            time.sleep(0.05)

    def body(self, prompt: str) -> dict[str, Any]:
        """A request for one token."""
        return {"model": self.model, "prompt": prompt, "max_tokens": 1, "stream": True, "temperature": 0}

    def unload(self) -> None:
        """Unload the model and wait until its process has ended."""
        post(self.address, "/models/unload", {"model": self.model})
        deadline = time.monotonic() + STOP_S
        while self._state() != "unloaded":
            if time.monotonic() > deadline:
                raise RuntimeError("llama-server does not unload its model")
            time.sleep(0.02)

    def _state(self) -> str:
        text = http_get(self.address, "/v1/models")[1]
        found = [one for one in json.loads(text)["data"] if one["id"] == self.model]
        return str(found[0]["status"]["value"]) if found else "missing"


def post(address: tuple[str, int], path: str, body: dict[str, Any]) -> int:
    """The status of a request with a JSON body."""
    connection = http.client.HTTPConnection(*address, timeout=60.0)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse().status
