"""The progress of a command: on a terminal a bar for each phase, elsewhere lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from pipeline.models import store

REPORT_S = 5.0  # between two lines about one phase
BYTES = 1_000_000  # a total above this is a number of bytes, one below it a count


@contextmanager
def shown(subject: str) -> Iterator[store.Progress]:
    """Yields a progress function: bars on a terminal, lines of text elsewhere."""
    if sys.stdout.isatty():
        with _bars(subject) as progress:
            yield progress
    else:
        lines = _Lines(subject)
        yield lines
        lines.finish()


class _Lines:
    """Prints a line when a phase begins, every `REPORT_S`, and when it ends."""

    def __init__(self, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.subject = subject
        self.clock = clock
        self.phase = ""
        self.total = 0
        self.begun = self.reported = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self.clock()
        if phase != self.phase:
            self.finish()
            self.phase, self.begun, self.reported = phase, now, now
            click.echo(f"{self.subject}: {phase} ...")
        elif now - self.reported >= REPORT_S and done < total:
            self.reported = now
            click.echo(f"{self.subject}: {phase} {_amount(done, total)}")
        self.total = total

    def finish(self) -> None:
        if self.phase:
            size = f"{self.total / 1e6:.0f} MB, " if self.total > BYTES else ""
            click.echo(f"{self.subject}: {self.phase} done ({size}{self.clock() - self.begun:.1f} s)")
        self.phase = ""


def _amount(done: int, total: int) -> str:
    return f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if total > BYTES else f"{done}/{total}" if total else ""


@contextmanager
def _bars(subject: str) -> Iterator[store.Progress]:
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[amount]:>16}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bars:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            amount = _amount(done, total)
            if phase not in tasks:
                for task in tasks.values():
                    bars.stop_task(task)
                tasks[phase] = bars.add_task(f"{subject}: {phase}", total=total or None, amount=amount)
            bars.update(tasks[phase], completed=done, total=total or None, amount=amount)

        yield show
