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

from pipeline import paths
from pipeline.errors import ConfigError, ModelNotFound, ResourceError, StarlingError
from pipeline.process import EXIT_CONFIG, EXIT_FATAL, EXIT_USAGE

# Before any import of numpy, wherever it is: its BLAS would start threads, which no process needs, and a
# supervisor that has threads cannot fork its stage.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

EXIT_INTERRUPTED = 130

COMMANDS = {
    "chaos": "pipeline.cli.chaos:chaos",
    "config": "pipeline.cli.show:config",
    "down": "pipeline.cli.down:down",
    "drain": "pipeline.cli.drain:drain",
    "fetch": "pipeline.cli.prepare:fetch",
    "kv": "pipeline.cli.kv:kv",
    "load": "pipeline.cli.reload:load",
    "logs": "pipeline.cli.logs:logs",
    "models": "pipeline.cli.show:models",
    "prepare": "pipeline.cli.prepare:prepare",
    "reload": "pipeline.cli.reload:reload",
    "restart": "pipeline.cli.restart:restart",
    "resume": "pipeline.cli.drain:resume",
    "stage": "pipeline.cli.stage:stage",
    "status": "pipeline.cli.status:status",
    "supervise": "pipeline.cli.stage:supervise",
    "unload": "pipeline.cli.reload:unload",
    "up": "pipeline.cli.up:up",
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
