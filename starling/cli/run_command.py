"""Runs a command as a program does: errors of the project become one message on stderr and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable

import click

from pipeline.config import paths
from pipeline.errors import ConfigError, InvalidRequest, NotFound, ResourceError, StarlingError
from pipeline.runtime.process import EXIT_CONFIG, EXIT_FATAL, EXIT_USAGE
from starling.cli import output, terminal

EXIT_INTERRUPTED = 130


def run_command(command: click.Command, name: str) -> None:
    """Run `command` with the arguments of this process, and exit. `name`: of the program, for messages."""
    run_program(lambda: command.main(prog_name=name, standalone_mode=False))


def run_program(program: Callable[[], object]) -> None:
    """Run what a command does, and exit with the code that it returns."""
    output.install()
    try:
        code = _run(program)
        sys.stdout.flush()
    except output.OutputError as error:
        output.discard()
        if not error.is_closed:
            terminal.complain(f"standard output: {error}; the rest was not printed")
        code = EXIT_FATAL
    sys.exit(code)


def _run(program: Callable[[], object]) -> int:
    try:
        code = program()
    except StarlingError as error:
        terminal.complain(error.message)
        if isinstance(error, NotFound | InvalidRequest):
            return EXIT_USAGE  # the user gave the name, or the value
        return EXIT_CONFIG if isinstance(error, ConfigError | ResourceError) else EXIT_FATAL
    except click.ClickException as error:
        if isinstance(error, click.UsageError):
            shown = io.StringIO()
            error.show(shown)
            terminal.print_error(shown.getvalue().removesuffix("\n"))
        else:
            terminal.complain(error.format_message())
        return error.exit_code
    except PermissionError as error:
        # The directories belong to another user's server. A command that went on would report that no server runs.
        where = f"{error.filename}: " if error.filename else ""
        home = f"this is user {os.getuid()}, STARLING_HOME is {paths.home()}"
        remedy = "run as its owner, or set another STARLING_HOME"
        terminal.complain(f"{where}{error.strerror}; {home}: {remedy}")
        return EXIT_CONFIG
    except (click.Abort, KeyboardInterrupt):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the program, without a traceback
        terminal.complain("interrupted")
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0
