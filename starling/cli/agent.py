"""`starling agent`: run engines on this host for a fleet."""

from __future__ import annotations

import os

import click

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.observe import logs
from pipeline.runtime import process
from starling.cli import output
from starling.cli.options import exit_codes


@click.command(
    epilog=exit_codes(
        {
            0: "ended on request",
            1: "failure that a retry may cure",
            78: "the configuration or the machine must be changed first",
        }
    )
)
@click.option("--join", metavar="STORE", help="The coordination store; default: fleet.store.")
@click.option("--id", "agent_id", metavar="ID", help="Id in the store; default: fleet.agent.id.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the control API, 0: any; default: fleet.agent.port."
)
def agent(join: str | None, agent_id: str | None, port: int | None) -> int:
    """Run engines on this host for a fleet, until Ctrl-C.

    The agent registers in the coordination store (sqlite:PATH, etcd://HOST:PORT or redis://HOST:PORT) and loads the
    published models that orchestrators ask for. Streams in flight finish first when it ends.
    """
    for key, value in (("STORE", join), ("AGENT__ID", agent_id), ("AGENT__PORT", port)):
        if value is not None:
            os.environ[f"STARLING_FLEET__{key}"] = str(value)
    config = load()
    process.raise_file_limit()
    name = config.fleet.agent.id
    logs.setup(name or "agent", config, paths.agent_logs_dir() if name else None, in_background=True)
    from stages.agent import stage

    return stage.main(config, _announce)


def _announce(agent_id: str, url: str) -> None:
    output.announce(f"Agent {agent_id} is ready at {url}")
    process.sd_notify(f"READY=1\nSTATUS=agent {agent_id}")
