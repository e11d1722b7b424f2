"""Published LoRA adapters on this machine.

    MODELS_DIR/adapters/DIGEST.lora         the file, as workers load it
    MODELS_DIR/adapters/BASE/NAME.json      the entry that it was pulled for; its modification time is the last use

Adapters without an entry were prepared here, from files of this machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.catalog.adapter_entry import FOLDER, AdapterEntry, decode, manifest_key
from pipeline.catalog.entry import encode
from pipeline.errors import StarlingError
from pipeline.files import make_directory, replace_file


def file_path(models_dir: Path, digest: str) -> Path:
    """Where the file of an adapter is."""
    return models_dir / FOLDER / f"{digest}.lora"


def record_path(models_dir: Path, name: str) -> Path:
    """Path of the entry of BASE:ADAPTER."""
    return models_dir / manifest_key(name)


def read(models_dir: Path, name: str) -> AdapterEntry | None:
    """The entry of BASE:ADAPTER; None without one."""
    return _read(record_path(models_dir, name))


def read_all(models_dir: Path) -> list[tuple[AdapterEntry, float]]:
    """All entries with the time of their last use, s since 1970."""
    found = []
    for path in sorted((models_dir / FOLDER).glob("*/*.json")):
        entry = _read(path)
        try:
            if entry is not None:
                found.append((entry, path.stat().st_mtime))
        except FileNotFoundError:  # removed meanwhile
            continue
    return found


def write(models_dir: Path, entry: AdapterEntry) -> None:
    """Write or replace an entry, which notes a use. Raises `OSError`, `ConfigError`."""
    path = record_path(models_dir, entry.name)
    make_directory(path.parent)
    replace_file(path, encode(entry), durable=True)


def remove(models_dir: Path, digest: str) -> int:
    """Remove a file and its entries; the bytes freed."""
    path = file_path(models_dir, digest)
    try:
        freed = path.stat().st_blocks * 512
    except OSError:
        freed = 0
    path.unlink(missing_ok=True)
    for entry, _ in read_all(models_dir):
        if entry.digest == digest:
            record = record_path(models_dir, entry.name)
            record.unlink(missing_ok=True)
            _remove_empty_parent(record)
    return freed


def _remove_empty_parent(path: Path) -> None:
    """Remove the directory of a removed entry if it was the last one there."""
    try:
        os.rmdir(path.parent)
    except OSError:
        return


def _read(path: Path) -> AdapterEntry | None:
    try:
        return decode(path.read_bytes(), str(path))
    except (OSError, StarlingError):  # missing or damaged: pulled again
        return None
