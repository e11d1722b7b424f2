"""honcho with seven changes, in the process of `starling up` (procfile_runner.py).

`python -m starling.cli.honcho_patch start -f PROCFILE` runs a Procfile alone. It knows that one command line: honcho's
own reads what every installed package declares, for a command that no server uses, which takes 30 ms.

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

SIGHUP asks for the end, too. What still runs at a second signal, or when the time for streams is over, is killed.
honcho would wait until a first process has ended, and for 5 s more.

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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self, TextIO

from honcho import environ, manager, printer

from pipeline.errors import ConfigError
from pipeline.runtime.malloc_trim import trim
from pipeline.runtime.process import EXIT_FATAL, LOST_SIGNAL_S
from pipeline.supervise.restart_policy import RestartPolicy
from starling.cli import env_file, forked_supervisor
from starling.cli.bounded_output import BoundedOutput
from starling.cli.env_file import ENV_FILE
from starling.cli.honcho_outputs import Outputs

FIRST_PORT = 5000  # honcho gives each process a variable PORT
HEALTHY_S = 5.0  # a process that has run for so long counts as one that had been ready
HELD_S = 0.1  # between two checks whether a killed process is due, or the server stops
KILL_S = 7.0  # from the first signal to SIGKILL, unless streams may take longer
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # ask for the end


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
                event = super().get(timeout if self.is_ending else self._owner.timeout_s())
                self._owner.on_wake()
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
        self.kill_s = KILL_S
        self.n_signals = 0  # that have asked for the end
        self._kill_at = float("inf")  # monotonic s
        self.is_stopping = False  # a signal has asked for the end, or a process has ended
        self._must_kill = self._is_killed = False
        self._policies: dict[str, RestartPolicy] = {}
        self._started: dict[str, float] = {}  # by process, monotonic s
        self._held: dict[str, tuple[float, Any]] = {}  # killed processes: when to start them, and their stop events

    @classmethod
    def of_procfile(cls, procfile: Path, environment: Mapping[str, str]) -> Self:
        """A manager of the processes of a Procfile, as `honcho start` makes it.

        Raises `ConfigError`: the Procfile cannot be read, or PORT is no number.
        """
        try:
            processes = environ.parse_procfile(procfile.read_text()).processes
        except OSError as error:
            raise ConfigError(f"{procfile}: cannot read the Procfile: {error.strerror}") from None
        port = environment.get("PORT") or str(FIRST_PORT)
        if not port.isdecimal():
            raise ConfigError(f"PORT is {port!r}: expected a number; correct it in {ENV_FILE} or the environment")
        own = cls(Printer(sys.stdout, colour=not environment.get("NO_COLOR"), prefix=True))
        for process in environ.expand_processes(processes, port=int(port)):
            env = {**environment, **process.env}
            own.add_process(process.name, process.cmd, quiet=process.quiet, env=env)
        return own

    def terminate(self) -> None:
        """Send SIGTERM to all processes; while some have not started, `on_start` does it after the last one."""
        self.is_stopping = True
        if self._all_started():
            super().terminate()

    def kill(self) -> None:
        """What honcho does 5 s after the first end: kill the remaining processes, unless they have time for streams."""
        if self.n_signals == 0:
            self._kill()

    def _kill(self) -> None:
        """Kill the remaining processes, once; while some have not started, `on_start` does it after the last one."""
        self._must_kill = True
        if self._all_started() and not self._is_killed:
            self._is_killed = True
            super().kill()

    def _start(self) -> None:
        if self.is_stopping:  # a signal came since honcho set its handlers
            self._on_signal(signal.SIGTERM, None)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has set it
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # those that `starling up` has held back
        forked_supervisor.preload()
        trim()
        commands = {name: entry["obj"].cmd for name, entry in self._processes.items()}
        for name in forked_supervisor.start_order(commands):
            self._start_one(name)

    def _start_one(self, name: str) -> None:
        process = self._processes[name]["obj"]
        self.events.start(process, forked_supervisor.child_of(process.cmd, process.env, process.cwd))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.n_signals += 1
        if self.n_signals > 1:
            self._kill()
            return
        self._system_print(f"{signal.Signals(number).name} received\n")
        self.returncode = 128 + number
        self._kill_at = time.monotonic() + self.kill_s
        self.terminate()

    def on_wake(self) -> None:
        """What is due; `Events` calls it whenever it wakes."""
        if time.monotonic() >= self._kill_at:
            self._kill_at = float("inf")
            self._kill()

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
            if self._is_killed:  # the signal to all processes came before its pid was known
                self._procmgr.kill(event.data["pid"])
            elif self._terminating:
                self._procmgr.terminate(event.data["pid"])
        if self.is_stopping:  # does nothing the second time
            self.terminate()
        if self._must_kill:
            self._kill()

    def hold(self, event: Any) -> Any:
        """Plan the restart of a killed process; returns the line to print.

        None if the process exited, has been killed too often, or the server is stopping.
        """
        code, now = event.data["returncode"], time.monotonic()
        if code >= 0 or self.is_stopping or self.events.is_ending:
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

    def timeout_s(self) -> float:
        """How long `Events` may sleep."""
        return max(0.0, min(HELD_S if self._held else LOST_SIGNAL_S, self._kill_at - time.monotonic()))

    def take_held(self) -> Any:
        """Start the killed processes that are due. If the server stops, returns the stop event of one instead."""
        for name, (due, event) in list(self._held.items()):
            if self.is_stopping or self.events.is_ending:
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
    try:
        env_file.merge(os.environ, lambda message: print(message, file=sys.stderr))
        own = Manager.of_procfile(Path(procfile), os.environ)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        sys.exit(EXIT_FATAL)
    own.loop()
    sys.exit(int(own.returncode or 0))


if __name__ == "__main__":
    main()
