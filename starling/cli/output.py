"""Standard output that fails with an error of its own, so that one place can tell it from every other `OSError`.

A command that writes to a full disk or to a closed pipe ends. A command that reads a file or a socket handles their
errors, and must take none of standard output for one of these.

Standard output has the locale's encoding. A character that this lacks is shown as `?` on a terminal. A file or a pipe
gets it as JSON escapes it: it must not be lost there, and a JSON object must stay one.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import sys
from typing import Any, BinaryIO, cast

import click

ESCAPED = "starling.escaped"  # the error handler of encodings


class OutputError(Exception):
    """Standard output does not take what a command prints. `number`: of errno. No `OSError`: commands handle those."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.number = error.errno

    @property
    def is_closed(self) -> bool:
        """Whether the reader of a pipe (head, less) has closed it, which is no failure."""
        return self.number == errno.EPIPE


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from None


def install() -> None:
    """Let `sys.stdout` raise `OutputError`. It exists: standard_streams.py."""
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):  # installed, or a caller's own
        return
    stream.flush()
    raw = _Output(stream.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        cast(BinaryIO, raw) if stream.write_through else io.BufferedWriter(raw),  # PYTHONUNBUFFERED
        stream.encoding,
        _errors_of(stream),
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _errors_of(stream: io.TextIOWrapper) -> str | None:
    """The handler of characters that the encoding lacks: that of the caller's PYTHONIOENCODING, if it has one."""
    if stream.errors != "strict":
        return stream.errors
    if stream.isatty():
        return "replace"
    codecs.register_error(ESCAPED, _escaped)
    return ESCAPED


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def discard() -> None:
    """Standard output goes nowhere from now on: the interpreter must not report at exit what it does not take."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    with contextlib.suppress(OutputError):
        sys.stdout.flush()


def announce(text: str) -> None:
    """Print a line of a process that goes on when nothing reads its output, such as a stage behind `| head -1`."""
    try:
        click.echo(text)
    except OutputError:
        discard()
