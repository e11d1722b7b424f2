"""`starling orchestrator`: one address in front of a fleet's agents."""

from __future__ import annotations

import os

import click

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
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the API, 0: any; default: fleet.orchestrator.port."
)
def orchestrator(join: str | None, port: int | None) -> int:
    """Serve the API for all agents of a fleet, until Ctrl-C.

    The orchestrator finds the agents in the coordination store (sqlite:PATH, etcd://HOST:PORT or redis://HOST:PORT),
    sends each request to one that has its model, and to another one when that one dies. Requests in flight finish first
    when it ends.
    """
    for key, value in (("STORE", join), ("ORCHESTRATOR__PORT", port)):
        if value is not None:
            os.environ[f"STARLING_FLEET__{key}"] = str(value)
    config = load()
    process.raise_file_limit()
    logs.setup("orchestrator", config, in_background=True)
    from stages.orchestrator import stage
    from starling.orchestrator_pages import make_pages

    def announce(port: int) -> None:
        output.announce(f"Orchestrator is ready at http://{config.fleet.orchestrator.host}:{port}")
        process.sd_notify("READY=1")

    return stage.main(config, announce, make_pages(config))
