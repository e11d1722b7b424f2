"""Runs a command as a program does: errors of the project become one message on stderr and an exit code."""

from __future__ import annotations

import errno
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
from starling.cli import interrupts, output, standard_streams, terminal

EXIT_INTERRUPTED = 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of a disk that takes nothing until it is changed


def run_command(command: click.Command, name: str) -> None:
    """Run `command` with the arguments of this process, and exit. `name`: of the program, for messages."""
    run_program(lambda: command.main(prog_name=name, standalone_mode=False))


def run_program(program: Callable[[], object]) -> None:
    """Run what a command does, and exit with the code that it returns."""
    standard_streams.open_missing()
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
    except OSError as error:
        terminal.complain(_os_error(error))
        return EXIT_CONFIG if error.errno in FULL or _is_deleted() else EXIT_FATAL
    except (click.Abort, KeyboardInterrupt):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the program, without a traceback
        terminal.complain("interrupted")
        return EXIT_INTERRUPTED
    except interrupts.Ended as end:
        terminal.complain(f"ended by {end.signal.name}")
        raise
    return code if isinstance(code, int) else 0


def _os_error(error: OSError) -> str:
    """What an error of the system says, with the file, for one that no command has handled."""
    if error.filename is None and _is_deleted():
        return "the working directory has been deleted: change to another one, or use absolute paths"
    where = f"{error.filename}: " if error.filename is not None else ""
    remedy = "; free space on that disk, or set another STARLING_HOME" if error.errno in FULL else ""
    return f"{where}{error.strerror or error or type(error).__name__}{remedy}"


def _is_deleted() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
