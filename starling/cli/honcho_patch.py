"""honcho with six changes: `python -m starling.cli.honcho_patch start -f PROCFILE` (started by honcho_runner.py).

It knows that one command line. honcho's own reads what every installed package declares, for a command that no server
uses: that is 30 ms of a start.

It reads the output of its processes itself. honcho forks a reader for each, which is memory for nothing
(honcho_outputs.py).

It sleeps while its processes run, but for a look every five seconds. honcho polls its event queue ten times per second,
although every event wakes it: that is a sixth of the CPU time of an idle server. Timeouts matter only after the first
process has ended.

It discards its output once the reader has closed the pipe, and drops lines while the reader does not read
(bounded_output.py). honcho would fail at the one and wait at the other, and then not end on SIGTERM.

It starts a process again that a signal has killed (SIGKILL, for instance by the kernel when memory is short). Such a
process is the supervisor of a stage, and the stage has died with it: honcho sees the end of a process only when all
its descendants have closed their output. A process that exits ends all others, as in honcho.

It obeys a signal that comes while it still starts its processes as soon as all have started. honcho would fail at it.

Supervisors are forks of it, which share its memory (forked_supervisor.py).
"""

from __future__ import annotations

import datetime
import os
import queue
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from honcho import environ, manager, printer

from pipeline.runtime.process import EXIT_FATAL, LOST_SIGNAL_S
from pipeline.supervise.restart_policy import RestartPolicy
from starling.cli import forked_supervisor
from starling.cli.bounded_output import BoundedOutput
from starling.cli.honcho_outputs import Outputs

ENV_FILE = ".env"  # in the working directory
FIRST_PORT = 5000  # honcho gives each process a variable PORT
HEALTHY_S = 5.0  # a process that has run for so long counts as one that had been ready
HELD_S = 0.1  # between two checks whether a killed process is due, or the server stops


class Events(Outputs):
    """honcho's event queue, which ignores timeouts until the first process has ended for good."""

    is_ending = False

    def __init__(self, owner: Manager) -> None:
        super().__init__()
        self._owner = owner

    def get(self, timeout: float | None = None) -> Any:
        """The next event. Raises `queue.Empty` at the timeout (s), once the first process has ended for good."""
        while True:
            event = self._owner.take_held()
            if event is None:
                event = super().get(timeout if self.is_ending else self._owner.held_timeout_s())
                if event is None:
                    if self.is_ending:
                        raise queue.Empty
                    continue
                if event.type == "start":
                    self._owner.on_start(event)
                elif event.type == "stop" and (line := self._owner.hold(event)) is not None:
                    return line
            self.is_ending = self.is_ending or event.type == "stop"
            return event


class Manager(manager.Manager):
    """honcho's manager with `Events`, which starts killed processes again."""

    events: Any  # a queue of multiprocessing at first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events.close()
        self.events = Events(self)
        self._procmgr = _Processes()
        self._is_stopping = False  # a signal has asked for the end
        self._is_killed = False
        self._policies: dict[str, RestartPolicy] = {}
        self._started: dict[str, float] = {}  # by process, monotonic s
        self._held: dict[str, tuple[float, Any]] = {}  # killed processes: when to start them, and their stop events

    def terminate(self) -> None:
        """Send SIGTERM to all processes; while some have not started, `on_start` does it after the last one."""
        self._is_stopping = True
        if self._all_started():
            super().terminate()

    def kill(self) -> None:
        """Kill the remaining processes. honcho asks at every event once its patience is over; once is enough."""
        if not self._is_killed:
            self._is_killed = True
            super().kill()

    def _start(self) -> None:
        commands = {name: entry["obj"].cmd for name, entry in self._processes.items()}
        for name in forked_supervisor.start_order(commands):
            self._start_one(name)

    def _start_one(self, name: str) -> None:
        process = self._processes[name]["obj"]
        self.events.start(process, forked_supervisor.child_of(process.cmd, process.env, process.cwd))

    def _system_print(self, data: str) -> None:
        # honcho's signal handler calls it too: through the events no print begins amid another one.
        name = manager.SYSTEM_PRINTER_NAME
        self.events.add(printer.Message(type="line", data=data, time=datetime.datetime.now(), name=name, colour=None))

    def on_start(self, event: Any) -> None:
        """A process has started; `event` has its pid."""
        self._started[event.name] = time.monotonic()
        entry = self._processes[event.name]
        entry["pid"] = event.data["pid"]
        if "returncode" in entry:  # it is a successor
            del entry["returncode"]
            if self._terminating:  # the signal to all processes came before its pid was known
                self._procmgr.terminate(event.data["pid"])
        if self._is_stopping:  # does nothing the second time
            self.terminate()

    def hold(self, event: Any) -> Any:
        """Plan the restart of a killed process; returns the line to print.

        None if the process exited, has been killed too often, or the server is stopping.
        """
        code, now = event.data["returncode"], time.monotonic()
        if code >= 0 or self._is_stopping or self.events.is_ending:
            return None
        policy = self._policies.setdefault(event.name, RestartPolicy(random.SystemRandom().random))
        ran_s = now - self._started.get(event.name, now)
        wait_s = policy.after_death(ran_s, was_ready=ran_s >= HEALTHY_S)
        if wait_s is None:
            return None
        self._held[event.name] = now + wait_s, event
        self._processes[event.name]["returncode"] = None  # honcho sends no signal to its pid, and goes on
        text = f"{event.name} was killed by {signal.Signals(-code).name}; starting it again\n"
        return printer.Message(type="line", data=text, time=event.time, name=manager.SYSTEM_PRINTER_NAME, colour=None)

    def held_timeout_s(self) -> float:
        """How long `Events` may sleep."""
        return HELD_S if self._held else LOST_SIGNAL_S

    def take_held(self) -> Any:
        """Start the killed processes that are due. If the server stops, returns the stop event of one instead."""
        for name, (due, event) in list(self._held.items()):
            if self._is_stopping or self.events.is_ending:
                del self._held[name]
                return event
            if time.monotonic() >= due:
                del self._held[name]
                self._start_one(name)
        return None


class _Processes:
    """Sends signals to processes with all that they have started."""

    def terminate(self, pid: int) -> None:
        """Send SIGTERM."""
        self._send(pid, signal.SIGTERM)

    def kill(self, pid: int) -> None:
        """Send SIGKILL."""
        self._send(pid, signal.SIGKILL)

    def _send(self, pid: int, number: int) -> None:
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):  # it has ended, or is a fork whose group has not begun
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


class Printer(printer.Printer):
    """honcho's printer that goes on when its reader has closed the pipe or does not read."""

    def __init__(self, output: TextIO = sys.stdout, **options: Any) -> None:
        super().__init__(BoundedOutput(output), **options)


def main() -> None:
    """`honcho start -f PROCFILE` with the changed classes, as the arguments of this process name it."""
    _, command, option, procfile = sys.argv
    if (command, option) != ("start", "-f"):
        raise ValueError(f"{sys.argv[1:]}: expected start -f PROCFILE")
    forked_supervisor.preload()
    sys.exit(_start(Path(procfile)))


def _start(procfile: Path) -> int:
    """Run the processes of a Procfile with the settings in `.env`, as `honcho start` does; the exit code."""
    try:
        settings = environ.parse(Path(ENV_FILE).read_text())
    except OSError:
        settings = {}
    try:
        processes = environ.parse_procfile(procfile.read_text()).processes
    except OSError as error:
        print(f"{procfile}: cannot read the Procfile: {error.strerror}", file=sys.stderr)
        return EXIT_FATAL
    port = str(settings.get("PORT") or os.environ.get("PORT") or FIRST_PORT)
    if not port.isdecimal():
        print(f"PORT is {port!r}: expected a number; correct it in .env or the environment", file=sys.stderr)
        return EXIT_FATAL
    own = Manager(Printer(sys.stdout, colour=True, prefix=True))
    for process in environ.expand_processes(processes, env=settings, port=int(port)):
        env = {**os.environ, **process.env}
        own.add_process(process.name, process.cmd, quiet=process.quiet, env=env)
    own.loop()
    return int(own.returncode or 0)


if __name__ == "__main__":
    main()
