"""honcho with two changes: `python -m starling.cli.honcho_patch start -f PROCFILE` (started by honcho_runner.py).

It sleeps while its processes run. honcho polls its event queue ten times per second, although every event wakes it:
that is a sixth of the CPU time of an idle server. Timeouts matter only after the first process has ended.

It discards its output once the reader has closed the pipe. honcho would fail, and end the server.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from typing import Any

from honcho import command, manager, printer

from starling.cli.broken_pipe import silence


class Events(Queue):
    """An event queue that ignores timeouts until the first process has ended."""

    is_ending = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next event; without a timeout until the first process has ended."""
        event = super().get(block, timeout if self.is_ending else None)
        self.is_ending = self.is_ending or event.type == "stop"
        return event


class Manager(manager.Manager):
    """honcho's manager with `Events`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events = Events(ctx=multiprocessing.get_context())


class Printer(printer.Printer):
    """honcho's printer that goes on after its reader has closed the pipe."""

    def write(self, message: printer.Message) -> None:
        """Write one message; a closed pipe is ignored."""
        try:
            super().write(message)
        except OSError:
            silence(self.output)


def main() -> None:
    """Run honcho's command line with the changed classes."""
    command.Manager = Manager
    command.Printer = Printer
    command.main()


if __name__ == "__main__":
    main()
