"""`starling fleet up`: a fleet by one of the launchers.

On this machine: an orchestrator, agents, and the first configured model.  Every part is a process of its own, started
again with a backoff when it ends.  All of them end with this process: on Ctrl-C the orchestrator first, so that its
streams finish, then the agents with their engines.  Other launchers start their parts, and the command ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import click

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import NotFound, StarlingError
from pipeline.runtime.process import EXIT_OK
from starling.cli import output, terminal
from starling.cli.fleet_launchers import launcher_option
from starling.cli.options import exit_codes
from starling.cli.publish import publish_configured
from starling.client.fleet import FleetClient
from starling.launchers.child import Child
from starling.launchers.local import END_S, LocalLauncher
from starling.launchers.select import open_launcher

CHECK_S = 0.1
LOADED_S = 0.5  # between two checks whether the model is loaded
CALL_S = 2.0  # for an orchestrator that hangs; meanwhile no agent is started again


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
    "--agents",
    type=click.IntRange(1, 64),
    metavar="N",
    help="How many agents; default: one, in a cluster as configured there.",
)
@click.option(
    "--replicas",
    type=click.IntRange(0, 64),
    metavar="N",
    help="On how many of them the first configured model is loaded; default: one, or two of several.",
)
@launcher_option
def up(agents: int | None, replicas: int | None, launcher: str | None) -> int:
    """Run a fleet: on this machine until Ctrl-C, or in a cluster.

    The first configured model (by default the demo model) is published in fleet.blobs and loaded. The parts find each
    other in fleet.store, by default a SQLite file of this home. With `--launcher kubernetes` Helm installs a fleet in a
    cluster, with `--launcher ray` the nodes of a Ray cluster get agents, with `--launcher systemd` this host gets the
    unit of its agent, and the command returns; `starling fleet down` ends what it has started.
    """
    config = load()
    starts = open_launcher(config, launcher)
    if not isinstance(starts, LocalLauncher):
        if replicas is not None:
            raise click.UsageError("--replicas is for the launcher local; use `starling fleet place` in a cluster")
        starts.start(agents)
        click.echo("started; `starling fleet launched` shows the agents, `starling fleet down` ends them")
        if (launcher or config.fleet.launcher) in ("ray", "systemd"):
            click.echo("start `starling orchestrator` where clients are to reach the fleet")
        return EXIT_OK
    agents = agents or 1
    model = config.models[0].name
    starts.claim()  # refused if another process runs a fleet here: nothing is published into it, nor ended below
    publish_configured(config, config.models[0])  # which a signal ends at once
    wanted = min(agents, 2) if replicas is None else replicas
    orchestrator = Child("orchestrator", ["orchestrator"], os.environ)
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: ending.set())
    try:
        starts.start(agents)
        return _run(config, orchestrator, starts, model, wanted, ending)
    finally:
        orchestrator.end(time.monotonic() + END_S)
        starts.stop()


def _run(
    config: Config, orchestrator: Child, agents: LocalLauncher, model: str, replicas: int, ending: threading.Event
) -> int:
    client = FleetClient(config, timeout_s=CALL_S)
    begun, looked, is_placed, is_announced = time.monotonic(), 0.0, False, False
    while not ending.wait(CHECK_S):
        code = orchestrator.tick(time.monotonic())
        if code is not None:
            terminal.print_error("orchestrator cannot start; its message is above")
            return code
        code = agents.tick(time.monotonic())
        if code is not None:
            return code
        if not is_placed and client.is_ready():
            is_placed = _place(client, model, replicas)
        if is_placed and not is_announced and time.monotonic() >= looked + LOADED_S:
            looked = time.monotonic()
            if not _is_loaded(client, model, replicas):
                continue
            is_announced = True
            output.announce(_banner(client, model, time.monotonic() - begun, bool(config.auth.api_keys)))
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
