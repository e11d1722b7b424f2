"""The width of the terminal, text from a model on it, and progress on standard error."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Protocol

import click

from pipeline.observe.log_format import PrettyFormatter

# C0 without tab and newline, DEL, C1: a model must not move the cursor, set the title or write to the clipboard.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BIDI = re.compile(r"[\u202a-\u202e\u2066-\u2069]")  # would reorder what follows on the line


COLUMNS = 80  # of text, also on a wider terminal
LEAST_COLUMNS = 20  # a terminal that says it has fewer does not know


def width() -> int:
    """Columns for text: those of the terminal, at most `COLUMNS`."""
    return min(COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else COLUMNS


def error_width() -> int:
    """Columns for messages on standard error, as `width`."""
    if not sys.stderr.isatty():
        return COLUMNS
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # a terminal without a size, or a stream without a descriptor
        return COLUMNS
    return min(COLUMNS, columns) if columns > LEAST_COLUMNS else COLUMNS


def show_warnings() -> None:
    """Print the warnings of a process that writes no log, with what they say beside their event, on standard error."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrettyFormatter("starling"))


def complain(message: str) -> None:
    """Print `starling: MESSAGE` on standard error. A message that it does not take does not change the exit code."""
    print_error(f"starling: {visible(message)}")


def print_error(text: str) -> None:
    """Print lines on standard error. On a terminal they are broken between words; paths and addresses stay whole."""
    if sys.stderr.isatty():
        room = error_width()
        parts = (
            textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
            for line in text.split("\n")
        )
        text = "\n".join(itertools.chain.from_iterable(parts))
    try:
        click.echo(text, err=True)
    except OSError:
        _discard_errors()


def _discard_errors() -> None:
    """Standard error goes nowhere from now on: the interpreter would end with 120 for what stays in its buffer."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, sys.stderr.fileno())
        finally:
            os.close(null)
        sys.stderr.flush()


def print_wrapped(line: str, indent: int) -> None:
    """Print a line. On a terminal what does not fit goes on below, indented; a pipe gets one line."""
    if not sys.stdout.isatty() or len(line) <= width():
        click.echo(line)
        return
    for part in textwrap.wrap(line, width(), subsequent_indent=" " * indent, break_on_hyphens=False):
        click.echo(part)


def visible(text: str) -> str:
    """`text` with control characters replaced by symbols for them."""
    return _BIDI.sub("\ufffd", _CONTROL.sub(_symbol, text))


def _symbol(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


class AnswerPrinter:
    """Prints the pieces of an answer to standard output as they come, and a newline at its end, also of a part."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last = "\n"

    def write(self, text: str) -> None:
        """Print a piece. A pipe gets the bytes as they are, a terminal no control characters."""
        if text:
            self._last = text[-1]
            click.echo(visible(text) if self._is_terminal else text, nl=False)

    def __enter__(self) -> AnswerPrinter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._last != "\n":
            click.echo()
            self._last = "\n"


def note(text: str) -> None:
    """A remark on standard error, dimmed on a terminal."""
    if not sys.stderr.isatty():
        click.echo(text, err=True)
        return
    for line in visible(text).split("\n"):
        wrapped = "\n".join(textwrap.wrap(line, error_width(), break_long_words=False, break_on_hyphens=False))
        click.echo(click.style(wrapped, dim=True), err=True)


class Progress(Protocol):
    """Shows what a long wait is for."""

    def show(self, line: str) -> None:
        """Replace the line that is shown."""


class _Quiet:
    def show(self, line: str) -> None:
        """Nothing: standard error is not a terminal."""


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """On a terminal a spinner with one line that is replaced and leaves nothing; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield _Quiet()
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("") as status:

        class Spinner:
            def show(self, line: str) -> None:
                from rich.markup import escape

                status.update(escape(visible(line)[: console.width - 4]))

        yield Spinner()
