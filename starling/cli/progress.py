"""The progress of a command: on a terminal a bar for each phase, elsewhere lines of text."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from pipeline.models import store

REPORT_S = 5.0  # between two lines about one phase
RATE_S = 10.0  # over which a rate is measured
BAR_COLUMNS = 12
OTHER_COLUMNS = BAR_COLUMNS + 7 + 3  # of a line beside subject, phase and amount: the bar, the time, gaps
LEAST_COLUMNS = 4  # of a subject
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
        self.rate = Rate(clock)

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self.clock()
        if phase != self.phase:
            self.finish()
            self.phase, self.begun, self.reported = phase, now, now
            click.echo(f"{self.subject}: {phase} ...")
            self.rate = Rate(self.clock)
        elif now - self.reported >= REPORT_S and done < total:
            self.reported = now
            click.echo(f"{self.subject}: {phase} {_amount(done, total)}{self.rate.text(done, total)}")
        self.rate.add(done)
        self.total = total

    def finish(self) -> None:
        if self.phase:
            size = f"{self.total / 1e6:.0f} MB, " if self.total > BYTES else ""
            click.echo(f"{self.subject}: {self.phase} done ({size}{self.clock() - self.begun:.1f} s)")
        self.phase = ""


class Rate:
    """Bytes per second over the last `RATE_S`, and the time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=512)

    def add(self, done: int) -> None:
        """`done` bytes are complete now."""
        now = self._clock()
        if not self._seen or now - self._seen[-1][0] >= RATE_S / 100:
            self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_S:
            self._seen.popleft()

    def text(self, done: int, total: int) -> str:
        """`, 12.3 MB/s, 1:05 left`; "" for counts and before the rate is known."""
        if total <= BYTES or not self._seen:
            return ""
        begun, first = self._seen[0]
        took = self._clock() - begun
        if took <= 0 or done <= first:
            return ""
        rate = (done - first) / took
        left = int((total - done) / rate)
        hours, minutes = divmod(left // 60, 60)
        shown = f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"
        return f", {rate / 1e6:.1f} MB/s, {shown} left"


def _amount(done: int, total: int) -> str:
    return f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if total > BYTES else f"{done}/{total}" if total else ""


@contextmanager
def _bars(subject: str) -> Iterator[store.Progress]:
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=BAR_COLUMNS),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bars:
        tasks: dict[str, TaskID] = {}
        rates: dict[str, Rate] = {}
        amounts: dict[str, str] = {}

        def described(phase: str) -> str:
            """The phase, as long as the widest amount leaves room on its line."""
            room = bars.console.width - OTHER_COLUMNS - max(map(len, amounts.values()))
            return f"{_shortened(subject, room - len(phase) - 2)}: {phase}"

        def show(phase: str, done: int, total: int) -> None:
            rate = rates.setdefault(phase, Rate())
            amounts[phase] = _amount(done, total) + (rate.text(done, total) if done < total else "")
            rate.add(done)
            if phase not in tasks:
                for task in tasks.values():
                    bars.stop_task(task)
                tasks[phase] = bars.add_task(described(phase), total=total or None, amount=amounts[phase])
            for known, task in tasks.items():
                bars.update(task, description=described(known))
            bars.update(tasks[phase], completed=done, total=total or None, amount=amounts[phase])

        yield show


def _shortened(text: str, room: int) -> str:
    """The text in `room` columns, but at least its beginning."""
    return text if len(text) <= room else f"{text[: max(LEAST_COLUMNS, room) - 1]}…"
