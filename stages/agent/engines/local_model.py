"""A model of `fleet.agent.engines`: files that are on this host already, and what they are.

The digest of a file is its SHA-256; that of a directory is the SHA-256 of its files' names and digests.  It is computed
once, and kept in digest.json with sizes and times: a file that was replaced is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline.config.schema import EngineConfig
from pipeline.errors import ConfigError
from pipeline.files import make_directory, replace_file
from shm.decoding import DECODE_ERRORS

MAX_FILES = 4096  # of a directory


class LocalModel(NamedTuple):
    """What is placed."""

    name: str
    digest: str
    nbytes: int
    engine: EngineConfig


class _Known(msgspec.Struct):
    state: list[tuple[str, int, int, int]]  # name, bytes, modification time in ns, inode
    digest: str


def find(engine: EngineConfig, folder: Path) -> LocalModel:
    """The model. `folder`: has digest.json. Reads its files if they have changed. Raises `ConfigError`."""
    path = Path(engine.path)
    try:
        files = _files(path)
        state = [_state(path, file) for file in files]
        known = _read(folder / "digest.json")
        if known is None or known.state != state:
            known = _Known(state, _digest(path, files))
            with contextlib.suppress(OSError):  # then it is computed again
                make_directory(folder)
                replace_file(folder / "digest.json", msgspec.json.encode(known))
    except OSError as error:
        raise ConfigError(
            f"fleet.agent.engines: {path} of {engine.model!r} cannot be read: {error.strerror}; put the model there, "
            f"or mend its path",
            "fleet.agent.engines",
        ) from None
    return LocalModel(engine.model, known.digest, sum(one[1] for one in state), engine)


def nbytes(engine: EngineConfig) -> int:
    """Size of its files; 0 if they are not here."""
    path = Path(engine.path)
    try:
        return sum(file.stat().st_size for file in _files(path))
    except (OSError, ConfigError):
        return 0


def _files(path: Path) -> list[Path]:
    """The files of a model, in order. Raises `OSError`, `ConfigError`."""
    if not path.is_dir():
        return [path]
    files = sorted(one for one in path.rglob("*") if one.is_file() and ".cache" not in one.relative_to(path).parts)
    if not files or len(files) > MAX_FILES:
        raise ConfigError(
            f"fleet.agent.engines: {path} has {len(files)} files, expected 1 to {MAX_FILES}", "fleet.agent.engines"
        )
    return files


def _state(path: Path, file: Path) -> tuple[str, int, int, int]:
    info = file.stat()
    return (os.path.relpath(file, path), info.st_size, info.st_mtime_ns, info.st_ino)


def _digest(path: Path, files: list[Path]) -> str:
    def sha256(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    if not path.is_dir():
        return sha256(path)
    lines = "".join(f"{sha256(file)}  {os.path.relpath(file, path)}\n" for file in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _read(path: Path) -> _Known | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Known)
    except (OSError, *DECODE_ERRORS):
        return None
