"""Runs a program of the project as a fork of this process instead of as a new program.

A new program imports Python's and the project's modules into memory of its own; a fork shares them with its parent, and
is there at once.  The parent must have one thread, because a fork lacks the others.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from pipeline import procfs
from pipeline.config import server_cores
from pipeline.runtime import process

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def can_fork(command: list[str]) -> bool:
    """Whether this process has one thread, and room for `command`, by which other processes recognize the child."""
    return len(procfs.threads()) == 1 and process.fits_command(command)


class ForkedProgram:
    """A child process, with those attributes of subprocess.Popen that are used here."""

    def __init__(
        self,
        command: list[str],
        main: Callable[[], object],
        env: Mapping[str, str],
        *,
        cwd: str | None = None,
        is_piped: bool = False,
        leads_session: bool = False,
        dies_with_parent: bool = False,
    ) -> None:
        """`main` ends with `SystemExit`, as a console script does; `command` is what `ps` shows.

        is_piped: stdout and stderr go to the pipe `stdout`.  leads_session: it starts a session, else a process group.
        """
        self.returncode: int | None = None  # exit code, or -signal
        env = dict(env)  # it may be that of this process, which the child empties
        reader, writer = os.pipe2(os.O_CLOEXEC) if is_piped else (-1, -1)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the child has its own handlers
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if dies_with_parent:
                    process.die_with_parent(parent)
                os.setsid() if leads_session else os.setpgid(0, 0)
                if is_piped:
                    os.dup2(writer, 1)
                    os.dup2(writer, 2)
                _prepare(command, env, cwd)
                _run(main)
            finally:
                os._exit(process.EXIT_FATAL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if is_piped:
            os.close(writer)
            self.stdout = io.BufferedReader(io.FileIO(reader))

    def wait(self) -> int:
        """Wait for the end; returns `returncode`."""
        if self.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED)
            assert ended is not None
            self.returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM. It has not been waited for, so its pid cannot have been reused."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def _prepare(command: list[str], env: Mapping[str, str], cwd: str | None) -> None:
    """Make a child what a new program would be."""
    process.close_files()
    server_cores.leave()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    logging.getLogger().handlers.clear()
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    process.set_command(command)


def _run(main: Callable[[], object]) -> NoReturn:
    """Run `main` as the interpreter would, and exit."""
    code = process.EXIT_OK
    try:
        main()
    except SystemExit as end:
        if end.code is not None:
            code = end.code if isinstance(end.code, int) else process.EXIT_FATAL
    except BaseException:
        traceback.print_exc()
        code = process.EXIT_FATAL
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
