"""Pulled models: names that point to files stored by digest.

    STARLING_HOME/models/
    ├── names/SLUG.json     a record: the digest, where it came from, what the file is
    └── DIGEST.gguf         the file, read-only; a model of `starling ingest` has DIGEST.idx and DIGEST.bin instead

A record is replaced atomically, and only after its file is in place and synchronized, so that a name always leads to
a whole file.  Several names may lead to one file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from pipeline.errors import ResourceError
from pipeline.files import replace_file, sync_directory
from pipeline.models import digests
from shm.decoding import DECODE_ERRORS

NAMES = "names"
MAGIC = b"GGUF"  # a model file begins with it


class Record(msgspec.Struct, frozen=True):
    """What a name means."""

    name: str
    digest: str  # SHA-256 of the file, hex
    nbytes: int
    source: str  # as it can be pulled again
    file: str = ""  # its name at the source
    revision: str = ""  # commit of a hub's repository
    pulled: float = 0.0  # s since 1970
    architecture: str = ""
    quantization: str = ""
    context_length: int = 0
    is_checkpoint: bool = False  # `DIGEST.idx` and `DIGEST.bin` were made from `source`, and no GGUF file is stored
    origin: str = ""  # of a checkpoint of a hub's repository: identifies its files and how they were converted


def blob_path(models_dir: Path, digest: str) -> Path:
    """Where the file of a digest is."""
    return models_dir / f"{digest}.gguf"


def model_path(models_dir: Path, record: Record) -> Path:
    """Where the file of a record is: a GGUF file, or the index of a checkpoint."""
    return models_dir / f"{record.digest}.idx" if record.is_checkpoint else blob_path(models_dir, record.digest)


def record_path(models_dir: Path, slug: str) -> Path:
    """Where the record of a name is."""
    return models_dir / NAMES / f"{slug}.json"


def read(models_dir: Path, slug: str) -> Record | None:
    """The record of a name; None if there is none that can be read."""
    try:
        return msgspec.json.decode(record_path(models_dir, slug).read_bytes(), type=Record)
    except (OSError, *DECODE_ERRORS):
        return None


def read_all(models_dir: Path) -> list[Record]:
    """Every record, by name."""
    try:
        slugs = sorted(name.removesuffix(".json") for name in os.listdir(models_dir / NAMES) if name[0] != ".")
    except OSError:
        return []
    return [record for slug in slugs if (record := read(models_dir, slug)) is not None]


def pulled(models_dir: Path) -> list[Record]:
    """The records of names that users have given; those of configured sources have "@" in their file names."""
    return [record for record in read_all(models_dir) if read(models_dir, record.name.replace("/", "--")) == record]


def write(models_dir: Path, slug: str, record: Record) -> None:
    """Let the name mean `record`. Raises `ResourceError`."""
    path = record_path(models_dir, slug)
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, msgspec.json.encode(record), durable=True)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}; free space there or move STARLING_HOME") from None


def remove(models_dir: Path, slug: str) -> bool:
    """Forget the name; whether it was known."""
    try:
        record_path(models_dir, slug).unlink()
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):
        sync_directory(models_dir / NAMES)
    return True


def place(part: Path, digest: str, name: str, models_dir: Path) -> Path:
    """Synchronize a complete file with a known digest to the disk and move it to its place; the place."""
    path = blob_path(models_dir, digest)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.chmod(0o444)
    part.rename(path)
    sync_directory(models_dir)
    digests.remember(name, path, digests.Stamp(*digests.identity(path.stat()), digest), models_dir)
    return path


def is_intact(path: Path, digest: str, models_dir: Path) -> bool:
    """Is the file there, unchanged since its digest was computed? Reads none of its bytes."""
    try:
        identity = digests.identity(path.stat())
    except OSError:
        return False
    stamp = digests.read_all(models_dir).get(os.path.realpath(path))
    return stamp is not None and stamp.sha256 == digest and digests.identity_of(stamp) == identity
