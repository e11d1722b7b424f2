"""Runs a command as a program does: errors of the project become one message on stderr and an exit code."""

from __future__ import annotations

import os
import sys

import click

from pipeline.config import paths
from pipeline.errors import ConfigError, ModelNotFound, ResourceError, StarlingError
from pipeline.runtime.process import EXIT_CONFIG, EXIT_FATAL, EXIT_USAGE

EXIT_INTERRUPTED = 130


def run_command(command: click.Command, name: str) -> None:
    """Run `command` with the arguments of this process, and exit. `name`: of the program, for messages."""
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except StarlingError as error:
        click.echo(f"starling: {error.message}", err=True)
        if isinstance(error, ModelNotFound):
            sys.exit(EXIT_USAGE)  # the user gave the name
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError | ResourceError) else EXIT_FATAL)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except PermissionError as error:
        # The directories belong to another user's server. A command that went on would report that no server runs.
        where = f"{error.filename}: " if error.filename else ""
        home = f"this is user {os.getuid()}, STARLING_HOME is {paths.home()}"
        remedy = "run as its owner, or set another STARLING_HOME"
        click.echo(f"starling: {where}{error.strerror}; {home}: {remedy}", err=True)
        sys.exit(EXIT_CONFIG)
    except (click.Abort, KeyboardInterrupt):
        click.echo("starling: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; the interpreter must not report that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FATAL)
    sys.exit(code if isinstance(code, int) else 0)
