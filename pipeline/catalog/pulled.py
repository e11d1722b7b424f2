"""Records of the published models on this machine: `MODELS_DIR/catalog/SLUG.json`, one for each name.

The file's modification time is the model's last use.  The models directory also contains checkpoints that were
prepared here, which have no record and are never evicted.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import msgspec

from pipeline.catalog.entry import FOLDER, Entry, manifest_key
from pipeline.errors import StarlingError
from pipeline.files import make_directory, replace_file
from pipeline.models.locks import lock
from shm.checkpoint import CheckpointError, Index, load_index
from shm.decoding import DECODE_ERRORS

PREFIX = "catalog:"  # of `models.path`
MAX_DIGESTS = 64  # of indexes, which are kept while their files do not change


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """A published model on this machine."""

    entry: Entry
    is_owned: bool  # false: the checkpoint was here already, so that its eviction removes the record only


def published_name(path: str) -> str:
    """The name in `models.path` = "catalog:NAME"; "" for other paths."""
    return path.removeprefix(PREFIX) if path.startswith(PREFIX) else ""


def record_path(models_dir: Path, name: str) -> Path:
    """Path of a name's record."""
    return models_dir / manifest_key(name)


def read(models_dir: Path, name: str) -> Pulled | None:
    """The record of a name; None without one."""
    return _read(record_path(models_dir, name))


def read_all(models_dir: Path) -> list[tuple[Pulled, float]]:
    """All records with the time of their last use, s since 1970."""
    found = []
    for path in sorted((models_dir / FOLDER).glob("*.json")):
        record = _read(path)
        try:
            if record is not None:
                found.append((record, path.stat().st_mtime))
        except FileNotFoundError:  # removed meanwhile
            continue
    return found


def write(models_dir: Path, record: Pulled) -> None:
    """Write or replace a record. Raises `OSError`, `ConfigError`."""
    path = record_path(models_dir, record.entry.name)
    make_directory(path.parent)
    with lock(models_dir, "catalog"):
        replace_file(path, msgspec.json.encode(record), durable=True)


def touch(models_dir: Path, name: str) -> None:
    """Note a use, as far as the disk allows it."""
    try:
        os.utime(record_path(models_dir, name))
    except OSError:
        return


def is_complete(models_dir: Path, entry: Entry) -> bool:
    """Whether the checkpoint of an entry is here: an index that is right, and a `.bin` of its size.

    An index that this release cannot use is right only if it is the published one: then the store has no other.
    """
    index = index_of(models_dir, entry)
    return index is not None and is_best(models_dir, entry, index)


def index_of(models_dir: Path, entry: Entry) -> Index | None:
    """The index of an entry's weights, whichever release made it; None without it or without a `.bin` of its size."""
    path = models_dir / f"{entry.digest}.idx"
    try:
        index = load_index(path, is_fresh=True)  # an agent runs for months: a disk may have damaged it meanwhile
        nbytes = path.with_suffix(".bin").stat().st_size
    except (OSError, CheckpointError):
        return None
    is_right = index.pieces_digest == entry.weights_checksum and nbytes == index.bin_bytes == entry.weights_bytes
    return index if is_right else None


def is_best(models_dir: Path, entry: Entry, index: Index) -> bool:
    """Whether this release can use an index that is here, or the store has no other one.

    One that it can use may have other bytes than the published one: it was migrated, or prepared here.
    """
    if is_usable(index):
        return True
    path = models_dir / f"{entry.digest}.idx"
    try:
        info = path.stat()
        return _sha256(path, (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)) == entry.index_sha256
    except OSError:
        return False


def is_usable(index: Index) -> bool:
    """Whether this release can use an index: its vocabulary is neither damaged nor of an older release."""
    try:
        return index.is_current
    except CheckpointError:
        return False


@functools.lru_cache(MAX_DIGESTS)
def _sha256(path: Path, identity: tuple[int, ...]) -> str:
    """SHA-256 (hex) of a file. `identity`: differs when it was changed. Raises `OSError`."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> Pulled | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Pulled)
    except (OSError, StarlingError, *DECODE_ERRORS):  # missing or damaged: pulled again
        return None
