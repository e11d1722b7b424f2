"""The command `starling`: what people and the Procfile start.

Each command is a module of this package, imported when it is called, so that a stage's start pays for
nothing but itself.  Stages are found by their dotted name at run time (`stages.NAME.stage`): the
package `pipeline` does not import them.

Exit codes: 0 done; 1 failed, trying again may help; 2 wrong usage; 78 the configuration or the
machine must be changed first; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import click

from pipeline.config import paths
from pipeline.errors import ConfigError, ModelNotFound, ResourceError, StarlingError
from pipeline.runtime.process import EXIT_CONFIG, EXIT_FATAL, EXIT_USAGE

# Before any import of numpy, wherever it is: its BLAS would start threads, which no process needs, and a
# supervisor that has threads cannot fork its stage.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

EXIT_INTERRUPTED = 130

COMMANDS = {
    "chaos": "starling.cli.chaos:chaos",
    "config": "starling.cli.show:config",
    "down": "starling.cli.down:down",
    "drain": "starling.cli.drain:drain",
    "fetch": "starling.cli.prepare:fetch",
    "kv": "starling.cli.kv:kv",
    "load": "starling.cli.reload:load",
    "logs": "starling.cli.logs:logs",
    "models": "starling.cli.show:models",
    "prepare": "starling.cli.prepare:prepare",
    "reload": "starling.cli.reload:reload",
    "restart": "starling.cli.restart:restart",
    "resume": "starling.cli.drain:resume",
    "stage": "starling.cli.stage:stage",
    "status": "starling.cli.status:status",
    "supervise": "starling.cli.stage:supervise",
    "unload": "starling.cli.reload:unload",
    "up": "starling.cli.up:up",
}


class _Commands(click.Group):
    """Imports a command's module when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 failed, trying again may help; 2 wrong usage; 78 the configuration or the "
    "machine must be changed first; 130 interrupted. COMMAND --help says what 1 means there.",
)
@click.option("--config", "config_file", metavar="FILE", help="Configuration, YAML or TOML.")
@click.version_option(package_name="starling", prog_name="starling")
def cli(config_file: str | None) -> None:
    """An LLM inference server of separate processes that share memory."""
    if config_file:
        # In the environment, so that every stage started from here reads the same file.
        os.environ["STARLING_CONFIG"] = str(Path(config_file).absolute())


def main() -> None:
    """The console script. Errors of ours are one clear message, never a traceback."""
    try:
        code = cli.main(prog_name="starling", standalone_mode=False)
    except StarlingError as error:
        click.echo(f"starling: {error.message}", err=True)
        if isinstance(error, ModelNotFound):
            sys.exit(EXIT_USAGE)  # a name that was given
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError | ResourceError) else EXIT_FATAL)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except PermissionError as error:
        # Of another user's server, whose directories are closed; a command that runs on would say that nothing runs.
        where = f"{error.filename}: " if error.filename else ""
        home = f"this is user {os.getuid()}, STARLING_HOME is {paths.home()}"
        click.echo(f"starling: {where}{error.strerror}; {home}: run as its owner, or name another", err=True)
        sys.exit(EXIT_CONFIG)
    except (click.Abort, KeyboardInterrupt):
        click.echo("starling: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has gone; the interpreter must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FATAL)
    sys.exit(code if isinstance(code, int) else 0)
