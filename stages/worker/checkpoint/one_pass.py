"""A GGUF file of this machine whose digest is not known: it is hashed while it is converted, and read once.

Used by `starling ingest` and, for configured paths, by everything that prepares a model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ConfigError, ResourceError
from pipeline.models import digests, store
from pipeline.models.locks import lock
from shm.checkpoint import Index, load_index
from shm.partial_checkpoint import PartialCheckpoint
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.hyperparameters import HyperReader
from stages.worker.checkpoint.ingest import SourceChanged, convert_and_hash
from stages.worker.checkpoint.source import REVISED, Source
from stages.worker.checkpoint.usable import is_usable


def revision_of(source: Source) -> int:
    """Part of what names a conversion: grows when the same files give other bytes, for these alone.

    2: the scale of the RoPE is that of llama.cpp, also where its type is missing or its factor has its old name.
    3: the K and V are others: `Hyper.kv_revision`.
    4: the source has what older releases read otherwise: `REVISED`.
    """
    if REVISED in source.metadata:
        return 4
    if HyperReader(source).kv_revision():
        return 3
    key = f"{source.metadata.get('general.architecture')}.rope"
    has_type, has_factor, has_old = (
        f"{key}.{name}" in source.metadata for name in ("scaling.type", "scaling.factor", "scale_linear")
    )
    return 2 if (has_old if has_type else has_factor) else 1


def prepare_file(
    file: GgufFile,
    models_dir: Path,
    pretokenizer: str = "",
    progress: store.Progress = store.no_progress,
    check_digest: Callable[[], object] = lambda: None,
) -> Index:
    """The index of the checkpoint of a file, which is made unless its digest is known and it exists.

    check_digest: called when the digest is known and stored, before the checkpoint has a name; if it raises
    `ConfigError` nothing is left.

    Raises as `ingest`.
    """
    info = file.path.stat()
    if (index := _known_index(file.path, info, models_dir)) is not None:
        return index
    identity = f"{os.path.realpath(file.path)} {digests.identity(info)} {pretokenizer}"
    tag = f"ingest-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    folder = models_dir / ".fetch" / tag

    def remember(digest: str) -> None:
        if file.identity() != digests.identity(info)[:2]:
            return  # the path names another file by now
        digests.remember(file.path.name, file.path, digests.Stamp(*digests.identity(info), digest), models_dir)
        try:
            check_digest()
        except ConfigError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    with lock(models_dir, tag):
        if (index := _known_index(file.path, info, models_dir)) is not None:
            return index  # of the process that had the lock
        partial = PartialCheckpoint(folder, f"{identity} {revision_of(file)}")
        check_space(file, models_dir, partial)
        try:
            return convert_and_hash(file, models_dir, progress, pretokenizer, partial, remember)
        except SourceChanged:
            shutil.rmtree(folder, ignore_errors=True)  # its tensors are of bytes that no file has
            raise


def _known_index(path: Path, info: os.stat_result, models_dir: Path) -> Index | None:
    known = digests.read_all(models_dir).get(os.path.realpath(path))
    if known is None or digests.identity_of(known) != digests.identity(info):
        return None
    index_path = models_dir / f"{known.sha256}.idx"
    return load_index(index_path) if is_usable(index_path) else None


def check_space(source: Source, models_dir: Path, partial: PartialCheckpoint) -> None:
    """Raise `ResourceError` if the disk is too small for the checkpoint."""
    stat = os.statvfs(models_dir)
    here = partial.bin_path.stat().st_size if partial.bin_path.exists() else 0
    needed, free = sum(info.nbytes for info in source.tensors.values()) - here, stat.f_bavail * stat.f_frsize
    if needed > free:
        raise ResourceError(
            f"{source.path}: its checkpoint needs {needed:,} bytes in {models_dir}, which has {free:,} free; free "
            f"some, set STARLING_HOME to another disk, or take a smaller --quant"
        )
