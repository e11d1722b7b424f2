"""Files for the results of long commands: whether they can be written is known before the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from pipeline.errors import StarlingError


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
    """Write the result. Raises `StarlingError`."""
    with writing(path):
        path.write_bytes(data)
