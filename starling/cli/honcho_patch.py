"""honcho that sleeps while its processes run: `python -m starling.cli.honcho_patch start -f PROCFILE` (foreman.py).

honcho's own loop looks ten times a second whether one of its processes has ended, though all that they do comes
to it as an event: a sixth of what a whole server at rest uses.  Only once something has ended it counts time.
It also fails when nobody reads its output any more; the server goes on without being read.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from typing import Any

from honcho import command, manager, printer

from starling.cli.broken_pipe import silence


class Events(Queue):
    """Waits without an end for the first process to stop; then as long as it is told."""

    is_ending = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        event = super().get(block, timeout if self.is_ending else None)
        self.is_ending = self.is_ending or event.type == "stop"
        return event


class Manager(manager.Manager):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events = Events(ctx=multiprocessing.get_context())


class Printer(printer.Printer):
    def write(self, message: printer.Message) -> None:
        try:
            super().write(message)
        except OSError:
            silence(self.output)


def main() -> None:
    command.Manager = Manager
    command.Printer = Printer
    command.main()


if __name__ == "__main__":
    main()
