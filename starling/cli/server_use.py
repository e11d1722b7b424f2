"""A running server for the time of a command: this home's server, or one that is started for it and ends with it.

A command that uses the server holds a shared lock on RUN_DIR/users.flock.  A server that was started for such a
command (`starling up --while-used`) waits for the exclusive lock and ends when it gets it: with the last user,
however that ended, because the kernel releases the locks of a dead process.  Commands that run at the same time share
one server.  A server that was started in any other way ignores the lock.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ModelUnavailable
from pipeline.observe import status
from pipeline.runtime import run_dir as rundir
from pipeline.runtime.process import EXIT_CONFIG
from starling.cli.users_lock import USERS, open_lock
from starling.client import address as addresses

START = "start.flock"  # one command at a time checks whether a server runs, and starts it
POLL_S = 0.1  # between two questions whether the server is ready
PROBE_TIMEOUT_S = 5.0
LINES = 40  # of the server's output, for the message about a start that failed
END_S = 15.0  # for the server to end; then it is killed
GATEWAY_S = 30.0  # without a gateway while other stages run: it may be starting again


class ServerUse:
    """Context manager: inside it a server of this home answers requests for `model`."""

    def __init__(
        self,
        config: Config,
        model: str,
        environment: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`environment`: settings of a server that is started. `on_progress` gets lines about its start."""
        self._config = config
        self._model = model
        self._environment = environment or {}
        self._on_progress = on_progress
        self._run_dir = paths.run_dir(config)
        self._users = -1
        self._child: subprocess.Popen[str] | None = None
        self._output: collections.deque[str] = collections.deque(maxlen=LINES)
        self._reader: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether the server was started for this command."""
        return self._child is not None

    def __enter__(self) -> ServerUse:
        run_dir = rundir.prepare(self._run_dir)
        try:
            self._users = open_lock(run_dir / USERS)
            fcntl.flock(self._users, fcntl.LOCK_SH)  # waits for the end of a server that is ending
            start = open_lock(run_dir / START)
            try:
                fcntl.flock(start, fcntl.LOCK_EX)
                if not is_running(run_dir):
                    self._start()
                self._wait_ready(run_dir)
            finally:
                os.close(start)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        child = self._child
        is_last = self._leave()
        if child is None:
            return
        if is_last or child.poll() is not None:  # otherwise it ends with the last command that uses it
            self._wait_end(child)
        if self._reader is not None and child.poll() is not None:
            self._reader.join()

    # -------------------------------------------------------------- the beginning

    def _start(self) -> None:
        self._on_progress("starting a server")
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "starling", "up", "--while-used"],
            env={**os.environ, **self._environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in the terminal reaches this process only
        )
        self._reader = threading.Thread(target=self._read, args=(self._child,), daemon=True)
        self._reader.start()

    def _read(self, child: subprocess.Popen[str]) -> None:
        """Read the output until its end, so that the server never waits for a full pipe."""
        assert child.stdout is not None
        with child.stdout as lines, contextlib.suppress(ValueError):
            for line in lines:
                line = line.rstrip()
                if line:
                    self._output.append(line)

    def _wait_ready(self, run_dir: Path) -> None:
        reported, seen = "", time.monotonic()
        while not self._answers():
            if self._child is None and not is_running(run_dir):
                raise ModelUnavailable(
                    "the server ended before it was ready; `starling logs` shows why, then try again"
                )
            if self._child is not None or rundir.lock_holder(run_dir, "up") or _has_gateway(run_dir):
                seen = time.monotonic()
            elif time.monotonic() - seen > GATEWAY_S:
                raise ModelUnavailable(
                    f"stages of a server run here, and no gateway for {GATEWAY_S:g} s; `starling status` shows them"
                )
            if self._child is not None:
                if self._child.poll() is not None:
                    self._raise_failed(self._child)
                newest = self._output[-1] if self._output else ""
                if newest != reported:
                    reported = newest
                    self._on_progress(newest)
            _wait(self._child, POLL_S)

    def _raise_failed(self, child: subprocess.Popen[str]) -> None:
        assert self._reader is not None
        self._reader.join()
        errors = [line for line in self._output if line.startswith("starling: ")]
        reason = errors[-1].removeprefix("starling: ") if errors else "\n".join(self._output)
        kind = ConfigError if child.returncode == EXIT_CONFIG else ModelUnavailable
        raise kind(f"the server could not be started: {reason or f'exit code {child.returncode}'}")

    def _answers(self) -> bool:
        """Can the request be sent? A server that this command has not started must only answer.

        Without a gateway of this run directory, what listens on the port is another program.
        """
        if not _has_gateway(self._run_dir):
            return False
        address = addresses.of_config(self._config)
        connection = address.connection(PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/ready")
            response = connection.getresponse()
            report = json.loads(response.read())
            if self._child is None or response.status == 200:
                return True
            model = report.get("models", {}).get(self._model)
            return bool(model and model["ready"])
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()

    # -------------------------------------------------------------- the end

    def _leave(self) -> bool:
        """Release the lock. True if no other command uses the server."""
        if self._users < 0:
            return True
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_last = True
        except BlockingIOError:  # another command holds it, or the server has it already, in order to end
            try:
                fcntl.flock(self._users, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_last = False
            except BlockingIOError:
                is_last = True
        os.close(self._users)
        self._users = -1
        return is_last

    def _wait_end(self, child: subprocess.Popen[str]) -> None:
        """The server ends by itself now. Ctrl-C and the end of patience make it end at once."""
        try:
            child.wait(END_S)
            return
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            pass
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                child.send_signal(number)
                child.wait(END_S / 2)
                return


def is_running(run_dir: Path) -> bool:
    """Does a server of this run directory run, or prepare its start? One whose gateway is being restarted does, too."""
    return bool(rundir.lock_holder(run_dir, "up")) or any(record.alive for record in status.read_all(run_dir))


def _has_gateway(run_dir: Path) -> bool:
    return any(record.stage == "gateway" and record.alive for record in status.read_all(run_dir))


def _wait(child: subprocess.Popen[str] | None, timeout_s: float) -> None:
    """Wait for the end of the child, at most `timeout_s`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if child is not None:
            child.wait(timeout_s)
        else:
            select.select([], [], [], timeout_s)
