"""Agents with homes and files of their own, asked directly: what a download and a load take there."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import paths
from pipeline.fleet import token
from pipeline.runtime.process import die_with_parent
from tools.bench.fleet.forwarding import _end, _line
from tools.bench.http.server_under_test import ROOT

TIMEOUT_S = 600.0
POLL_S = 0.02


class Site:
    """What the agents of one measurement share: a folder, the coordination store, the token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._token = folder / "token"
        self._token.write_text(secrets.token_urlsafe(32))
        self._token.chmod(0o600)

    def config(self, blobs: str, models: list[dict[str, Any]], **fleet: Any) -> dict[str, Any]:
        """The configuration of an agent, or of a publisher."""
        store = f"sqlite:{self.folder / 'fleet.db'}"
        shared = {"store": store, "token": str(self._token), "blobs": blobs, "free_mb": 1}
        return {"models": models, "fleet": shared | fleet}

    @property
    def headers(self) -> dict[str, str]:
        """Of a request to an agent."""
        return token.authorization(self._token.read_text().strip())


def environment(home: Path, config: dict[str, Any]) -> dict[str, str]:
    """Of a process with a home of its own, and the compiled kernels of this one."""
    home.mkdir(parents=True, exist_ok=True)
    kernels = paths.cache_dir()
    kernels.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (home / kernels.name).symlink_to(kernels)
    (home / "starling.yaml").write_text(yaml.safe_dump(config))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("STARLING_", "LLM_ENGINE_"))}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return kept | {"STARLING_HOME": str(home), "STARLING_CONFIG": str(home / "starling.yaml"), "PYTHONPATH": path}


class AgentUnderTest:
    """A running agent."""

    def __init__(self, site: Site, home: Path, port: int) -> None:
        self.home = home
        self._site = site
        self._port = port

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST to the agent; its answer. Raises `RuntimeError` for a refusal."""
        headers = {"Content-Type": "application/json", **self._site.headers}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)) as connection:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        if response.status >= 300:
            raise RuntimeError(f"{path} answers {response.status}: {answer}")
        return answer

    def first_token_s(self, model: str) -> float:
        """Seconds from the request to load a model to the first event of a stream."""
        begun = time.perf_counter()
        loaded = self.call("/load_model", {"model_id": model})
        host, _, port = loaded["inference_endpoint_url"].removeprefix("http://").partition("/")[0].rpartition(":")
        body = {"model": model, "prompt": "The keeper climbed", "max_tokens": 1, "stream": True, "temperature": 0}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {loaded['engine_key']}"}
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            line = response.readline()
            while line and not line.startswith(b"data: {"):
                line = response.readline()
            seconds = time.perf_counter() - begun
            response.read()
        if response.status != 200 or not line:
            raise RuntimeError(f"the engine of {model} answers {response.status}")
        return seconds

    def settle(self) -> None:
        """Wait until a standby engine waits for a model, as on an agent that has been running for a while."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            with contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
            ) as connection:
                connection.request("GET", "/metrics", headers=self._site.headers)
                if re.search(rb"^starling_agent_standby_engines [1-9]", connection.getresponse().read(), re.MULTILINE):
                    return
            time.sleep(POLL_S)
        raise RuntimeError(f"no standby engine waits after {TIMEOUT_S:.0f} s")

    def unload(self, model: str, drop_cached: bool = False) -> None:
        """End the engine, and remove the files if `drop_cached`."""
        self.call("/unload_model", {"model_id": model, "drop_cached": drop_cached})

    def begin(self, model: str) -> None:
        """Ask for a model, and do not wait for it."""
        self.call("/load_model", {"model_id": model, "wait": False})

    def has_arrived(self, model: str) -> bool:
        """Whether the files of a model that was asked for are here. Raises `RuntimeError` if it has failed."""
        found = next(one for one in self.call("/heartbeat", {})["loaded_models"] if one["model_id"] == model)
        if found["cache_state"] == "FAILED":
            raise RuntimeError(found["error"])
        is_downloading = (found.get("progress") or {}).get("phase") == "download"  # of a READY model: its last layers
        return bool(found["cache_state"] != "DOWNLOADING" and not is_downloading)

    def files(self) -> list[Path]:
        """The checkpoints that are here."""
        return sorted(path for path in (self.home / "models").glob("*.*") if path.suffix in (".bin", ".idx"))


@contextlib.contextmanager
def agent(site: Site, name: str, blobs: str, models: list[dict[str, Any]], **fleet: Any) -> Iterator[AgentUnderTest]:
    """An agent that is registered, and has no model."""
    home = site.folder / name
    process = subprocess.Popen(
        [sys.executable, "-m", "starling", "agent", "--port", "0", "--id", name],
        cwd=ROOT,
        env=environment(home, site.config(blobs, models, **fleet)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(site.folder / f"{name}.log").open("wb"),
        text=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    try:
        ready = re.search(r" is ready at http://127\.0\.0\.1:(\d+)", _line(process, "Agent "))
        assert ready is not None
        yield AgentUnderTest(site, home, int(ready[1]))
    finally:
        _end(process)


def publish(site: Site, blobs: Path, models: list[dict[str, Any]]) -> None:
    """Publish configured models into a folder."""
    config = site.config(str(blobs), models)
    for model in models:
        name = model["name"]
        subprocess.run(
            [sys.executable, "-m", "starling", "publish", model.get("path", name), "--name", name],
            cwd=ROOT,
            env=environment(site.folder / "publisher", config),
            stdout=subprocess.DEVNULL,
            check=True,
        )
