"""`starling fleet up`: a fleet on this machine: an orchestrator, agents, and the first configured model.

Every part is a process of its own, started again with a backoff when it ends.  All of them end with this process: on
Ctrl-C the orchestrator first, so that its streams finish, then the agents with their engines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import click

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import NotFound, StarlingError
from pipeline.runtime.process import EXIT_CONFIG, EXIT_OK, die_with_parent
from starling.cli.options import exit_codes
from starling.cli.publish import publish_configured
from starling.client.fleet import FleetClient

FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.2, 10.0
STEADY_S = 30.0  # a process that ran for so long starts with the first backoff again
CHECK_S = 0.1
END_S = 15.0  # from SIGTERM to SIGKILL


class Part:
    """One process of the fleet."""

    def __init__(self, name: str, arguments: list[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "starling", *arguments]
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._next = 0.0

    def tick(self, now: float) -> int | None:
        """Start it, or start it again; an exit code that no restart can cure, or None."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return None
            self._process = None
            if code == EXIT_CONFIG:
                return code
            if now - self._begun > STEADY_S:
                self._backoff_s = FIRST_BACKOFF_S
            click.echo(f"{self.name} ended with {code}; it is started again in {self._backoff_s:g} s", err=True)
            self._next = now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, MOST_BACKOFF_S)
        if now >= self._next:
            parent = os.getpid()
            self._begun = now
            self._process = subprocess.Popen(
                self._command,
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=lambda: die_with_parent(parent),
            )
        return None

    def end(self, deadline: float) -> None:
        """SIGTERM; SIGKILL at the deadline (s, monotonic)."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@click.command(
    epilog=exit_codes(
        {
            0: "ended on request",
            1: "failure that a retry may cure",
            78: "the configuration or the machine must be changed first",
        }
    )
)
@click.option(
    "--agents", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N", help="How many agents."
)
@click.option(
    "--replicas",
    type=click.IntRange(0, 64),
    metavar="N",
    help="On how many of them the first configured model is loaded; default: one, or two of several.",
)
def up(agents: int, replicas: int | None) -> int:
    """Run a fleet on this machine until Ctrl-C.

    The first configured model (by default the demo model) is published in fleet.blobs and loaded. The parts find each
    other in fleet.store, by default a SQLite file of this home.
    """
    config = load()
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: ending.set())
    parts = [Part("orchestrator", ["orchestrator"], os.environ)]
    parts += [
        Part(f"agent-{number}", ["agent", "--id", f"agent-{number}", "--port", "0"], os.environ)
        for number in range(1, agents + 1)
    ]
    model = config.models[0].name
    publish_configured(config, config.models[0])
    wanted = min(agents, 2) if replicas is None else replicas
    try:
        return _run(config, parts, model, wanted, ending)
    finally:
        for part in parts:
            part.end(time.monotonic() + END_S)


def _run(config: Config, parts: list[Part], model: str, replicas: int, ending: threading.Event) -> int:
    client = FleetClient(config)
    begun, is_placed, is_announced = time.monotonic(), False, False
    while not ending.wait(CHECK_S):
        for part in parts:
            code = part.tick(time.monotonic())
            if code is not None:
                click.echo(f"{part.name} cannot start; its message is above", err=True)
                return code
        if not is_placed and client.is_ready():
            is_placed = _place(client, model, replicas)
        if is_placed and not is_announced and _is_loaded(client, model, replicas):
            is_announced = True
            click.echo(_banner(client, model, time.monotonic() - begun, bool(config.auth.api_keys)))
    return EXIT_OK


def _place(client: FleetClient, model: str, replicas: int) -> bool:
    try:
        client.post("/v1/fleet/place", model=model, replicas=replicas)
    except StarlingError:
        return False  # the orchestrator has not read the catalog yet
    return True


def _is_loaded(client: FleetClient, model: str, replicas: int) -> bool:
    with suppress(StarlingError, NotFound):
        found = next((one for one in client.get("/v1/fleet")["models"] if one["id"] == model), None)
        return found is not None and len(found["agents"]) >= replicas
    return False


def _banner(client: FleetClient, model: str, took_s: float, has_keys: bool) -> str:
    key = " \\\n    -H 'Authorization: Bearer YOUR-API-KEY'" if has_keys else ""
    return (
        f"\nThe fleet is ready at {client.address} ({took_s:.1f} s). Try it:\n\n"
        f"  curl -N {client.address}/v1/chat/completions{key} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "stream": true,\n'
        f'         "messages": [{{"role": "user", "content": "Tell me a short story."}}]}}\'\n\n'
        "Ctrl-C ends it.\n"
    )
