"""The command `starling`, which operators and the Procfile call.

Each command is a module of this package. It is imported only when it is called, so that a stage starts without
the imports of other commands.

Exit codes: 0 success; 1 failure that a retry may cure; 2 wrong usage; 78 the configuration or the machine must
be changed first; 130 interrupted.
"""

from __future__ import annotations

import os
from pathlib import Path

from starling.cli import interrupts

interrupts.end_silently()  # before the imports that take time

import click  # noqa: E402

from pipeline.runtime.paused_collector import paused_collector  # noqa: E402
from starling.cli import env_file, terminal  # noqa: E402
from starling.cli.options import exit_codes  # noqa: E402
from starling.cli.run_command import run_command  # noqa: E402

# Set before the first import of numpy: its BLAS would start threads, which no process needs, and a supervisor with
# threads cannot fork its stage.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

COMMANDS = (
    "adapter",
    "agent",
    "bench",
    "catalog",
    "chaos",
    "chat",
    "completion",
    "config",
    "doctor",
    "down",
    "drain",
    "fetch",
    "fleet",
    "gc",
    "ingest",
    "keys",
    "kv",
    "load",
    "log-level",
    "logs",
    "models",
    "orchestrator",
    "prepare",
    "publish",
    "pull",
    "reload",
    "restart",
    "resume",
    "rm",
    "run",
    "show",
    "stage",
    "status",
    "supervise",
    "support-bundle",
    "top",
    "trace",
    "unload",
    "unpublish",
    "up",
    "verify",
)
# They start servers, for which a `.env` that cannot be read matters. Their stages do not repeat the warning.
STARTING = frozenset({"agent", "chat", "fleet", "orchestrator", "run", "up"})


def load_command(name: str) -> click.Command | None:
    """Import the module of the command `name` and return the command; None if there is no such command.

    The imports stand here, one per command, so that `starling stage` imports no module of another command.
    """
    match name:
        case "adapter":
            from starling.cli.adapter import adapter

            return adapter
        case "agent":
            from starling.cli.agent import agent

            return agent
        case "bench":
            from starling.cli.bench import bench

            return bench
        case "catalog":
            from starling.cli.publish import catalog

            return catalog
        case "chaos":
            from starling.cli.chaos import chaos

            return chaos
        case "chat":
            from starling.cli.chat import chat

            return chat
        case "completion":
            from starling.cli.completion import completion

            return completion
        case "config":
            from starling.cli.show import config

            return config
        case "doctor":
            from starling.cli.doctor import doctor

            return doctor
        case "down":
            from starling.cli.down import down

            return down
        case "drain":
            from starling.cli.drain import drain

            return drain
        case "fetch" | "pull":
            from starling.cli.pull import pull

            return pull
        case "fleet":
            from starling.cli.fleet import fleet

            return fleet
        case "keys":
            from starling.cli.keys import keys

            return keys
        case "kv":
            from starling.cli.kv import kv

            return kv
        case "load":
            from starling.cli.reload import load

            return load
        case "log-level":
            from starling.cli.log_level import log_level

            return log_level
        case "logs":
            from starling.cli.logs import logs

            return logs
        case "gc":
            from starling.cli.models import gc

            return gc
        case "ingest":
            from starling.cli.ingest import ingest

            return ingest
        case "models":
            from starling.cli.models import models

            return models
        case "orchestrator":
            from starling.cli.orchestrator import orchestrator

            return orchestrator
        case "rm":
            from starling.cli.models import rm

            return rm
        case "show":
            from starling.cli.models import show

            return show
        case "prepare":
            from starling.cli.prepare import prepare

            return prepare
        case "publish":
            from starling.cli.publish import publish

            return publish
        case "reload":
            from starling.cli.reload import reload

            return reload
        case "restart":
            from starling.cli.restart import restart

            return restart
        case "resume":
            from starling.cli.drain import resume

            return resume
        case "run":
            from starling.cli.run import run

            return run
        case "stage":
            from starling.cli.stage import stage

            return stage
        case "status":
            from starling.cli.status import status

            return status
        case "supervise":
            from starling.cli.stage import supervise

            return supervise
        case "support-bundle":
            from starling.cli.support_bundle import support_bundle

            return support_bundle
        case "top":
            from starling.cli.top import top

            return top
        case "trace":
            from starling.cli.trace import trace

            return trace
        case "unload":
            from starling.cli.reload import unload

            return unload
        case "unpublish":
            from starling.cli.publish import unpublish

            return unpublish
        case "up":
            from starling.cli.up import up

            return up
        case "verify":
            from starling.cli.verify import verify

            return verify
    return None


class _Commands(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        with paused_collector():
            return load_command(cmd_name)


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=exit_codes(
        {
            0: "success",
            1: "failure that a retry may cure; COMMAND --help says which",
            2: "wrong usage: no such command, option, model or stage",
            78: "the configuration or the machine must be changed first",
        }
    ),
)
@click.option("--config", "config_file", type=click.Path(), metavar="FILE", help="Configuration file, YAML or TOML.")
@click.version_option(package_name="starling", prog_name="starling")
def cli(config_file: str | None) -> None:
    """Run and operate an LLM inference server of separate processes.

    A command acts on the server of STARLING_HOME (default: ~/.starling).
    """
    is_start = click.get_current_context().invoked_subcommand in STARTING
    env_file.merge(os.environ, terminal.complain if is_start else lambda message: None)
    if os.environ.get("NO_COLOR"):
        click.get_current_context().color = False
    if config_file:
        # Through the environment every stage that this command starts reads the same file.
        os.environ["STARLING_CONFIG"] = str(Path(config_file).absolute())


def main() -> None:
    """The console script."""
    interrupts.raise_again()
    run_command(cli, "starling")
