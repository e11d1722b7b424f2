"""Known SHA-256 digests of model files: `digests.json`, by path, size, mtime and inode.

A file that has not changed is not hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.errors import ConfigError, ResourceError
from pipeline.files import replace_file
from pipeline.models.locks import lock
from shm.decoding import DECODE_ERRORS

FILE = "digests.json"
CHUNK = 1 << 20  # bytes read at a time


class Stamp(msgspec.Struct, frozen=True):
    """A digest, and the identity of the file it belongs to."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str
    is_factor_compared: bool = False  # the checkpoint of an older release has the file's attention factor


def identity(info: os.stat_result) -> tuple[int, int, int]:
    """What changes when a file's contents may have changed."""
    return info.st_size, info.st_mtime_ns, info.st_ino


def identity_of(stamp: Stamp) -> tuple[int, int, int]:
    """The identity of the file that a stamp belongs to."""
    return stamp.size, stamp.mtime_ns, stamp.inode


def read_all(models_dir: Path) -> dict[str, Stamp]:
    """Known digests by real path."""
    try:
        return msgspec.json.decode((models_dir / FILE).read_bytes(), type=dict[str, Stamp])
    except (OSError, *DECODE_ERRORS):  # missing or damaged: digests are computed again
        return {}


def remember(name: str, path: Path, stamp: Stamp, models_dir: Path) -> None:
    """Store the digest of a file. Raises `ResourceError` on a full disk."""
    with lock(models_dir, "digests"):
        stamps = {known: one for known, one in read_all(models_dir).items() if os.path.exists(known)}
        stamps[os.path.realpath(path)] = stamp
        try:
            replace_file(models_dir / FILE, msgspec.json.encode(stamps))
        except OSError as error:
            raise ResourceError(
                f"{models_dir}: the digest of model {name!r} cannot be written: {error.strerror}; free space "
                f"there or move STARLING_HOME"
            ) from None


def forget(path: Path, models_dir: Path) -> None:
    """Remove the digest of a file, which is then computed again. A read-only directory keeps it."""
    with lock(models_dir, "digests"):
        stamps = read_all(models_dir)
        if stamps.pop(os.path.realpath(path), None) is not None:
            with contextlib.suppress(OSError):
                replace_file(models_dir / FILE, msgspec.json.encode(stamps))


def compute(path: Path, progress: Callable[[str, int, int], None]) -> Stamp:
    """The SHA-256 of a file, and the identity of what was read. Raises `ConfigError` if it changes meanwhile."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        before = identity(os.fstat(file.fileno()))
        while done <= before[0] and (chunk := file.read(CHUNK)):  # a file that grows must not be read for ever
            digest.update(chunk)
            done += len(chunk)
            progress("checksum", done, before[0])
        after = identity(os.fstat(file.fileno()))
    if before != after or done != before[0]:
        raise ConfigError(f"{path} was changed while it was hashed; try again when it is complete", "models.path")
    return Stamp(*after, digest.hexdigest())
