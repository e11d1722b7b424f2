"""`python -m tools.bench.loading`: what a load on demand costs its first request. The last line is one JSON object.

Times are milliseconds at the client, from the request to the first token of its stream: of a model that is not loaded
and whose file is in the operating system's page cache, and of the loaded one.  Both servers take turns, round by
round, so that what else the machine does meets both; figures are medians with the lowest and the highest.  Prompts are
random words: nothing is cached.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

import click
import msgspec

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, ModelConfig
from pipeline.models import store
from tools.bench.disturbance import Watch
from tools.bench.http.baseline import BaselineMissing
from tools.bench.http.server_under_test import ServerUnderTest, http_get
from tools.bench.loading.router import RouterServer
from tools.bench.offline.results import machine

WORDS = ("river", "stone", "light", "garden", "winter", "paper", "engine", "silver", "window", "music")
PROMPT_WORDS = 16
CONTEXT = 4096  # of the baseline
SETTLE_S = 0.5  # after an unload, for its memory to be freed
TIMEOUT_S = 120.0


class Server(Protocol):
    """A server that loads a model when a request names it."""

    name: str
    address: tuple[str, int]

    def body(self, prompt: str) -> dict[str, Any]:
        """A request for one token."""

    def unload(self) -> None:
        """Unload the model, and wait for it."""


class OnDemandServer(ServerUnderTest):
    """The server under test, with a model that its first request loads."""

    def __init__(self, model: dict[str, Any], cores: list[int]) -> None:
        """`model`: its entry in the configuration's `models`."""
        super().__init__({**model, "preload": False}, cores, {"on_demand": {"keep_alive": -1}}, {})

    def body(self, prompt: str) -> dict[str, Any]:
        """A request for one token."""
        return {"model": self.model, "prompt": prompt, "max_tokens": 1, "stream": True, "temperature": 0}

    def unload(self) -> None:
        """Send a request with `keep_alive` 0, and wait until the model is unloaded."""
        first_token_ms(self, keep_alive=0)
        deadline = time.monotonic() + TIMEOUT_S
        while json.loads(http_get(self.address, f"/v1/models/{self.model}")[1])["state"] != "unloaded":
            if time.monotonic() > deadline:
                raise RuntimeError("the model is not unloaded")
            time.sleep(0.02)


def first_token_ms(server: Server, **fields: Any) -> float:
    """Milliseconds from a request to the first event of its stream. Raises `RuntimeError` for a refusal."""
    prompt = " ".join(random.choices(WORDS, k=PROMPT_WORDS)) + f" {random.randrange(10**6)}"
    connection = http.client.HTTPConnection(*server.address, timeout=TIMEOUT_S)
    with closing(connection):
        connection.connect()
        begun = time.perf_counter()
        body = json.dumps({**server.body(prompt), **fields})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{server.name}: {response.status} {response.read(300).decode(errors='replace')}")
        while not (line := response.readline()).startswith(b"data:"):
            if not line:
                raise RuntimeError(f"{server.name}: the stream ended before its first token")
        if b'"error"' in line:
            raise RuntimeError(f"{server.name}: {line.decode(errors='replace')}")
        took = 1000 * (time.perf_counter() - begun)
        response.read()
    return took


def one_round(server: Server, files: list[Path]) -> tuple[float, float]:
    """Time to the first token of the model that is not loaded, and of the loaded one."""
    server.unload()
    for path in files:
        path.read_bytes()  # into the page cache, if it had left it
    time.sleep(SETTLE_S)
    return first_token_ms(server), first_token_ms(server)


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "median_ms": round(statistics.median(values), 1),
        "low_ms": round(min(values), 1),
        "high_ms": round(max(values), 1),
    }


def measure(servers: list[Server], files: list[Path], rounds: int, show: Callable[[str], object]) -> dict[str, Any]:
    """The figures of each server, by its name."""
    times: dict[str, list[tuple[float, float]]] = {server.name: [] for server in servers}
    for number in range(rounds + 1):
        for server in servers:
            found = one_round(server, files)
            if number:  # the first round prepares the model
                times[server.name].append(found)
                show(f"loading: {server.name:14} not loaded {found[0]:8.1f} ms, loaded {found[1]:8.1f} ms")
    return {
        name: {"not_loaded": spread([one[0] for one in found]), "loaded": spread([one[1] for one in found])}
        for name, found in times.items()
    }


@click.command()
@click.option("--rounds", default=9, show_default=True)
@click.option("--model", "path", type=click.Path(path_type=Path, exists=True), help="A GGUF file; default: the demo.")
@click.option("--cores", default="", help="The servers' cores, comma separated; default: two of those allowed.")
@click.option("--baseline/--no-baseline", default=True, show_default=True, help="Measure llama-server's router too.")
def main(rounds: int, path: Path | None, cores: str, baseline: bool) -> None:
    """From a request to the first token of a model that is not loaded."""
    numbers = [int(c) for c in cores.split(",")] if cores else sorted(os.sched_getaffinity(0))[:2]
    entry = {"name": path.stem, "path": str(path.resolve())} if path is not None else {"name": DEMO_MODEL}
    settings = ModelConfig(name=entry["name"], path=entry.get("path", ""))
    file = store.gguf_path(settings, paths.models_dir())
    watch = Watch([], numbers)
    with ExitStack() as stack:
        servers: list[Server] = [stack.enter_context(OnDemandServer(entry, numbers))]
        if baseline:
            try:
                servers.append(stack.enter_context(RouterServer(file, numbers, CONTEXT)))
            except BaselineMissing as error:
                click.echo(f"loading: no baseline: {error}")
        first_token_ms(servers[0])  # prepares the model
        index = store.find_index(settings, paths.models_dir())
        files = [file, *([index, index.with_suffix(".bin")] if index is not None else [])]
        figures, signs = watch.observe(lambda: measure(servers, files, rounds, click.echo))
    report = {"machine": machine(numbers), "signs": signs._asdict(), "rounds": rounds, "loading": figures}
    click.echo(msgspec.json.encode(report).decode())


def run() -> None:
    """Run the command as a program."""
    # A context manager ends the servers: turn SIGTERM into an exception, so that it runs.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
