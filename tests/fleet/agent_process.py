"""An agent as a process of its own, and requests to it and to its engines."""

from __future__ import annotations

import http.client
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from click.testing import CliRunner

from starling.cli import cli
from tests.e2e.server import ROOT, START_S, Server
from tools.tiny_gguf import SHAPES, Shape, write_model

SPARING = {"STARLING_FLEET__AGENT__STANDBY_ENGINES": "0", "STARLING_FLEET__AGENT__COMPILE_KERNELS": "false"}
MAIN = "from starling.cli import main; main()"


def publish_tiny(folder: Path, blobs: Path, name: str = "tiny", seed: int = 1, shape: Shape = SHAPES["small"]) -> None:
    """Publish a small random model into the folder store `blobs`; `folder`: for its files."""
    gguf = folder / f"{name}.gguf"
    write_model(gguf, shape, "Q8_0", seed=seed)
    env = {"STARLING_HOME": str(folder / "publisher"), "STARLING_FLEET__BLOBS": str(blobs)}
    result = CliRunner().invoke(cli, ["publish", str(gguf), "--name", name], env=env)
    assert result.exit_code == 0, result.output


def post(url: str, body: Any, key: str) -> tuple[int, Any]:
    """POST JSON with a key or token; the status and the decoded body."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=START_S)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection.request("POST", parts.path, data, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


class Agent(Server):
    """`starling agent` with a home of its own; it is registered when `__enter__` returns."""

    preamble = ""  # Python that its process runs first

    def start(self) -> Agent:
        program = ("-c", f"{self.preamble}; {MAIN}") if self.preamble else ("-m", "starling")
        self.process = subprocess.Popen(
            [sys.executable, *program, "agent", "--port", "0"],
            cwd=ROOT,
            # Its imports take a second of CPU: tests that are not about standby engines do without.
            # So do compilers of kernels, for homes that have none.
            env={**SPARING, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines = queue.SimpleQueue()  # drops the output of an earlier start
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()
        return self

    def wait_ready(self) -> Agent:
        self.url = self.wait_for(r"Agent \S+ is ready at (https?://\S+)")[1]
        token = self.home / "fleet-token"
        self.token = token.read_text().strip() if token.exists() else ""  # an agent that requires TLS has none
        return self

    def call(self, path: str, **body: Any) -> tuple[int, Any]:
        return post(self.url + path, body, self.token)

    def model(self, name: str) -> dict[str, Any]:
        """What a heartbeat says of a model."""
        status, report = self.call("/heartbeat")
        assert status == 200, report
        return next(one for one in report["loaded_models"] if one["model_id"] == name)
