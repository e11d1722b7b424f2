"""`starling logs`: the log files of the stages, merged in order of time, and followed."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click

from pipeline.config import paths
from pipeline.observe.log_format import pretty
from pipeline.runtime.process import EXIT_FATAL
from starling.cli import terminal
from starling.cli.options import exit_codes, json_option
from starling.cli.stage import STAGES

POLL_S = 0.2
MAX_LINES = 1_000_000

Line = tuple[str, dict[str, Any], bytes]  # timestamp (ISO 8601), fields, the line as it was read


@click.command(epilog=exit_codes({0: "success", 1: "that stage has no log file"}))
@click.argument("stage", type=click.Choice(STAGES), required=False, metavar="[STAGE]")
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they come, until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, MAX_LINES),
    default=50,
    show_default=True,
    help="How many of the last lines to print.",
)
@json_option("Print the lines as they are in the files (JSON).")
def logs(stage: str | None, follow: bool, lines: int, as_json: bool) -> int:
    """Print the logs of the stages and their supervisors.

    STAGE is tokenizer, scheduler, kv, worker (all models) or gateway; the default is all of them. The files are in
    STARLING_HOME/logs. Rotated files are not read.
    """
    directory = paths.logs_dir()
    tails = {name: Tail(directory / f"{name}.log") for name in _names(stage)}
    try:
        return _print(directory, tails, follow, lines, as_json)
    finally:
        for tail in tails.values():
            tail.close()


def _print(directory: Path, tails: dict[str, Tail], follow: bool, lines: int, as_json: bool) -> int:
    last: deque[Line] = deque(maxlen=lines or None)
    newest = _in_order(tails, lines)
    if lines:
        last.extend(newest)
    if not follow and not any(tail.path.exists() for tail in tails.values()):
        terminal.complain(f"no log in {directory}")
        return EXIT_FATAL
    for line in last:
        _show(line, as_json)
    while follow:
        for line in _in_order(tails):
            _show(line, as_json)
        time.sleep(POLL_S)
    return 0


def _names(stage: str | None) -> list[str]:
    names = [name for one in ((stage,) if stage else STAGES) for name in (one, f"{one}-supervisor")]
    return [*names, "worker-pool"] if stage in (None, "worker") else names  # the log of the worker pool


def _in_order(tails: dict[str, Tail], at_most: int | None = None) -> list[Line]:
    lines = [line for tail in tails.values() for line in tail.read(at_most)]
    return sorted(lines, key=lambda line: line[0])


def _show(line: Line, as_json: bool) -> None:
    _, fields, raw = line
    click.echo(raw.decode("utf-8", "replace") if as_json else pretty(fields))


class Tail:
    """Reads the lines of a log file that grows and is replaced from time to time (rotation)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self, at_most: int | None = None) -> list[Line]:
        """The lines since the last call; first the whole file. `at_most` limits them to the last ones."""
        lines: deque[Line] = deque(maxlen=at_most)
        for raw in self._raw():
            try:
                fields = json.loads(raw)
                lines.append((fields["ts"], fields, raw))
            except (ValueError, KeyError, TypeError):  # truncated, or not a log line
                continue
        return list(lines)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _raw(self) -> Iterator[bytes]:
        yield from self._new()
        if self._file is not None and self._is_replaced():
            yield from self._new()  # lines between the last read and the rotation
            self.close()
            self._rest = b""
            yield from self._new()

    def _new(self) -> Iterator[bytes]:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        yield from whole

    def _is_replaced(self) -> bool:
        assert self._file is not None
        try:
            return self.path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False  # between two renames
