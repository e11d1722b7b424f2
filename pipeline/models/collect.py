"""Removes files of the models directory that no model needs. The callers know which digests are in use."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.catalog import pulled, pulled_adapters
from pipeline.models import digests, registry
from pipeline.models.locks import is_locked, lock, remove_unheld

_FILE = re.compile(r"([0-9a-f]{64})\.(gguf|idx|bin|verified|used)")
_SCRATCH = (
    "pip-"  # begins the name of a directory of pip's, which belongs to the download of a wheel (package_index.py)
)


class Item(NamedTuple):
    """A file or a directory that is removed."""

    path: str
    nbytes: int
    reason: str


def collect(
    models_dir: Path,
    in_use: Collection[str],
    is_dry: bool,
    with_downloads: bool = True,
    adapters_in_use: Collection[str] = (),
) -> list[Item]:
    """Remove what is not in use, or only list it (`is_dry`).

    in_use: digests of configured and loaded models.  Files whose name is still pulled, or whose source is in the models
    directory or known by its path, stay.  A download or conversion that runs is left alone.

    adapters_in_use: digests of adapters of loaded models.  Other prepared adapters are removed along with downloads:
    they are prepared again from their files.  Pulled ones stay: they have no other file here.
    """
    removed: list[Item] = []
    with lock(models_dir, "names"):
        # Listed first: a file that comes later stays, and who has placed one that is here has noted its digest before.
        here = sorted(models_dir.iterdir())
        # A file that a pull has just placed has no record yet, and which file that is, its lock does not say.
        is_pulling = any(is_locked(one) for one in models_dir.glob(".pull-*.lock"))
        # Nor has the checkpoint that was made of a hub's repository just now.
        is_converting = any(is_locked(one) for one in models_dir.glob(".hf-*.lock"))
        needed = {*in_use, *(record.digest for record in registry.read_all(models_dir))}
        needed |= {record.entry.digest for record, _ in pulled.read_all(models_dir)}  # published ones have no GGUF
        stored = {found[1] for path in here if (found := _FILE.fullmatch(path.name))}
        blobs = {os.path.realpath(registry.blob_path(models_dir, digest)) for digest in stored - needed}
        for known, stamp in digests.read_all(models_dir).items():
            if known not in blobs and os.path.exists(known):
                needed.add(stamp.sha256)
        for path in here:
            found = _FILE.fullmatch(path.name)
            if found and found[1] not in needed and not is_locked(models_dir / f".ingest-{found[1][:16]}.lock"):
                if (is_pulling and found[2] == "gguf") or (is_converting and found[2] in ("idx", "bin")):
                    continue
                reason = "no model has this file" if found[2] == "gguf" else "its model file is gone"
                removed.append(Item(str(path), _size(path), reason))
                if not is_dry:
                    path.unlink(missing_ok=True)
    if with_downloads:
        are_pulled = {entry.digest for entry, _ in pulled_adapters.read_all(models_dir)}
        removed += _adapters(models_dir, {*adapters_in_use, *are_pulled}, is_dry)
        removed += _downloads(models_dir, is_dry)
        if not is_dry:
            remove_unheld(models_dir)
    return removed


def _adapters(models_dir: Path, in_use: Collection[str], is_dry: bool) -> Iterator[Item]:
    for path in sorted((models_dir / "adapters").glob("*.lora")):
        if path.stem not in in_use:
            yield Item(str(path), _size(path), "no loaded model uses this adapter")
            if not is_dry:
                path.unlink(missing_ok=True)


def _downloads(models_dir: Path, is_dry: bool) -> Iterator[Item]:
    """Unfinished downloads and conversions that no process continues."""
    folder = models_dir / ".fetch"
    # A file is of a configured or a published model; by its name it is not known which.
    is_fetching = any(
        is_locked(one) for pattern in (".fetch-*.lock", ".pull-*.lock") for one in models_dir.glob(pattern)
    )
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        locks = [models_dir / f".{prefix}{path.name}.lock" for prefix in ("pull-", "")]  # a conversion has its own name
        has_lock = path.is_dir() and not path.name.startswith(_SCRATCH)
        if any(map(is_locked, locks)) if has_lock else is_fetching:
            continue
        nbytes = _size(path)
        if not is_dry:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        yield Item(str(path), nbytes, f"unfinished {'conversion' if path.name.startswith('ingest-') else 'download'}")


def _size(path: Path) -> int:
    """Bytes on the disk; a file with another name costs nothing."""
    files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
    sizes = []
    for file in files:
        with contextlib.suppress(OSError):
            info = file.stat()
            sizes.append(info.st_blocks * 512 if info.st_nlink == 1 else 0)
    return sum(sizes)
