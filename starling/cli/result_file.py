"""Files for the results of long commands: whether they can be written is known before the work."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import click

from pipeline.errors import StarlingError
from pipeline.files import replace_file

# Nothing can be made beside the file, or renamed over it (a mount point), but it may be written itself.
_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)


@contextlib.contextmanager
def claimed(option: str, *paths: Path) -> Iterator[None]:
    """Check that the files of `option` can be written. Those made for it that stay empty are removed in the end.

    What exists keeps its contents; of pipes and devices nothing is opened. Raises `click.UsageError`.
    """
    made, checked = [], []
    try:
        for path in paths:
            with _as_usage(option, path):
                is_new = not path.exists()
                if is_new or path.is_file():
                    with path.open("ab"):
                        checked.append(path)
                    if is_new:
                        made.append(path)
        yield
    finally:
        for path in checked:
            if path in made:
                with contextlib.suppress(OSError):
                    if not path.stat().st_size:
                        path.unlink()


def make_directory(option: str, directory: Path) -> None:
    """Make the directory of `option` if it is not there. Raises `click.UsageError`."""
    with _as_usage(option, directory):
        directory.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _as_usage(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.UsageError(f"{option} {path}: {error.strerror}; name one that can be written") from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """While results are written. Raises `StarlingError`."""
    try:
        yield
    except OSError as error:
        raise StarlingError("STORAGE_UNAVAILABLE", f"{path}: {error.strerror}; the result was not written") from None


def write(path: Path, data: bytes) -> None:
    """Write the result; an earlier one is replaced as a whole, or stays, where the directory can be written.

    What this process has as its standard output or error (`/dev/stdout`, `/dev/fd/1`) goes there, behind what has been
    written.  Raises `StarlingError`.
    """
    with writing(path):
        if (stream := _stream_of(path)) is not None:
            stream.flush()
            with open(stream.fileno(), "wb", closefd=False) as out:
                out.write(data)
        elif path.exists() and not path.is_file():  # a pipe or a device; /dev/fd/N resolves to no path
            path.write_bytes(data)
        else:
            target = path.resolve()  # a link stays one
            mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
            try:
                replace_file(target, data)
                if mode is not None:
                    target.chmod(mode)
            except OSError as error:
                if error.errno not in _IN_PLACE:
                    raise
                target.write_bytes(data)


def _stream_of(path: Path) -> TextIO | None:
    """The standard stream of this process that `path` names."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, absent, or not of a file
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream
    return None
