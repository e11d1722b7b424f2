"""Agents as processes of this machine: children of `starling fleet up`, which ends with them.

Another process of the same home lists and stops them: the process that runs them holds a lock in STARLING_HOME/fleet
and writes there what it runs.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from pipeline.config import paths
from pipeline.errors import ConfigError, NotFound, StarlingError
from pipeline.files import replace_file
from pipeline.runtime import run_dir
from shm.decoding import DECODE_ERRORS
from starling.cli import terminal
from starling.cli.logs import Tail
from starling.launchers.child import Child
from starling.launchers.interface import LaunchedAgent

LOCK = "local"
END_S = 15.0  # for agents and their engines, from SIGTERM to SIGKILL
STOP_S = 60.0  # for the process that runs the agents, which ends an orchestrator, too
POLL_S = 0.2
CLAIMS, CLAIM_S = 10, 0.05  # attempts to lock the home, and between two of them: a reader holds the lock for a moment
_HOST = "localhost"


class LocalLauncher:
    """The agents of this home. `tick` must be called a few times a second in the process that has started them."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        """Raises `ConfigError` when the directory belongs to another user."""
        self._env = env
        self._dir = paths.home(env) / "fleet"
        self._record = self._dir / "agents.json"
        self._lock: run_dir.StageLock | None = None
        self._agents: list[Child] = []
        self._written: list[LaunchedAgent] | None = None

    def start(self, agents: int | None) -> None:
        """Have this many agents (None: one) run as children of this process.

        Raises `ConfigError` when another process has some.
        """
        agents = agents or 1
        self.claim()
        for child in self._agents[agents:]:
            child.end(time.monotonic() + END_S)
        names = [f"agent-{number}" for number in range(1, agents + 1)]
        self._agents = self._agents[:agents] + [
            Child(name, ["agent", "--id", name, "--port", "0"], self._env) for name in names[len(self._agents) :]
        ]
        self.tick(time.monotonic())

    def claim(self) -> None:
        """Become the one process that may run agents of this home. Idempotent.

        Raises `ConfigError` when another process has some.
        """
        if self._lock is not None:
            return
        directory = run_dir.prepare(self._dir, "directory of the fleet", "STARLING_HOME")
        for attempt in range(CLAIMS):
            try:
                self._lock = run_dir.StageLock(directory, LOCK)
                break
            except ConfigError:
                holder = run_dir.lock_holder(directory, LOCK)
                if holder or attempt == CLAIMS - 1:
                    raise ConfigError(
                        f"{f'process {holder}' if holder else 'another process'} runs a fleet in {directory.parent} "
                        "already: end it with `starling fleet down`, or give this one a STARLING_HOME of its own"
                    ) from None
                time.sleep(CLAIM_S)
        with suppress(OSError):
            self._record.unlink()  # of a process that was killed

    def tick(self, now: float) -> int | None:
        """Start what has ended; an exit code that no restart can cure, or None."""
        codes = [child.tick(now) for child in self._agents]
        running = [_launched(child) for child in self._agents]
        if running != self._written:
            with suppress(OSError):  # on a full disk the agents run all the same
                replace_file(self._record, msgspec.json.encode(running), mode=0o600)
                self._written = running
        for child, code in zip(self._agents, codes):
            if code is not None:
                terminal.print_error(f"{child.name} cannot start; its message is above")
                return code
        return None

    def stop(self) -> None:
        """End the agents, here or by ending the process that runs them. Raises `StarlingError` when it does not end."""
        if self._lock is not None:
            deadline = time.monotonic() + END_S
            for child in self._agents:
                child.ask_to_end()
            for child in self._agents:
                child.end(deadline)
            self._agents = []
            self._record.unlink(missing_ok=True)
            return
        holder = run_dir.lock_holder(self._dir, LOCK)
        if not holder:
            return
        try:
            fd = os.pidfd_open(holder)
        except ProcessLookupError:
            return
        try:
            if run_dir.lock_holder(self._dir, LOCK) != holder:
                return  # it has ended, and its pid may be another process's
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            if not select.select([fd], [], [], STOP_S)[0]:
                raise StarlingError("INTERNAL", f"process {holder} still runs the fleet after {STOP_S:g} s")
        finally:
            os.close(fd)

    def list(self) -> tuple[LaunchedAgent, ...]:
        """The agents of this home, whichever process runs them."""
        if self._lock is not None:
            return tuple(map(_launched, self._agents))
        if not run_dir.lock_holder(self._dir, LOCK):
            return ()
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=tuple[LaunchedAgent, ...])
        except (OSError, *DECODE_ERRORS):
            return ()

    def logs(self, agent_id: str, lines: int, *, follow: bool) -> Iterator[str]:
        """The lines of the agent's log file, which stays when the agent ends. Raises `NotFound`."""
        tail = Tail(log_file(agent_id, self._env))
        if not tail.path.is_file():
            raise NotFound(f"there is no log of an agent {agent_id!r} in {tail.path.parent}")
        try:
            last = tail.read(lines) if lines else []
            yield from (raw.decode("utf-8", "replace") for _, _, raw in last)
            while follow:
                time.sleep(POLL_S)
                yield from (raw.decode("utf-8", "replace") for _, _, raw in tail.read())
        finally:
            tail.close()


def log_file(agent_id: str, env: Mapping[str, str] = os.environ) -> Path:
    """The log of an agent that has its id from its command or its configuration."""
    return paths.agent_logs_dir(env) / f"{Path(agent_id).name}.log"


def _launched(child: Child) -> LaunchedAgent:
    return LaunchedAgent(
        agent_id=child.name,
        host=_HOST,
        state="running" if child.pid else "starting",
        restarts=max(0, child.starts - 1),
    )
