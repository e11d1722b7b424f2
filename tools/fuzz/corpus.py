"""The corpus of a target: one archive in the repository, a directory while fuzzing.

The archive holds few inputs (`coverage.py` picks them), so that replaying them is part of the fast tests.  The same
inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ARCHIVES = Path(__file__).resolve().parents[2] / "tests" / "data" / "fuzz"
MAX_ARCHIVE_BYTES = 200_000  # of a target
_DATE = (1980, 1, 1, 0, 0, 0)


def input_name(data: bytes) -> str:
    """File name of an input, from its contents."""
    return hashlib.sha256(data).hexdigest()[:16]


def read_archive(target: str, directory: Path = ARCHIVES) -> list[bytes]:
    """The stored inputs of a target; none if it has no archive yet."""
    path = directory / f"{target}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist()]


def write_archive(target: str, inputs: Iterable[bytes], directory: Path = ARCHIVES) -> Path:
    """Store the inputs of a target."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{target}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in sorted((input_name(data), data) for data in inputs):
            entry = zipfile.ZipInfo(name, _DATE)
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    return path


def read_directory(directory: Path) -> list[bytes]:
    """The inputs in a directory."""
    return [path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()]


def add_to_directory(directory: Path, inputs: Iterable[bytes]) -> None:
    """Write inputs into a directory, each once."""
    directory.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (directory / input_name(data)).write_bytes(data)
