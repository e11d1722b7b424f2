"""From a configured model to a checkpoint that can be mapped: fetch, ingest, compile.

Idempotent.  One process does the work (`flock`), others wait for it and find the result; what is there
already costs a look at a file.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.config.schema import ModelConfig
from pipeline.models import store
from pipeline.models.locks import lock
from shm.checkpoint import CheckpointError, load_index
from stages.worker.checkpoint.ingest import ingest


def prepare_checkpoint(
    model: ModelConfig, models_dir: Path, progress: store.Progress = store.no_progress, digest: str = ""
) -> Path:
    """The model's `.idx`, made if need be. Raises `StarlingError` with what is wrong and what to do.

    `digest`: of the version that is wanted, when it has been made: the file may be another by now.
    """
    if digest and _is_usable(index_path := models_dir / f"{digest}.idx"):
        return index_path
    located = store.fetch(model, models_dir, progress)
    index_path = models_dir / f"{located.digest}.idx"
    with lock(models_dir, f"ingest-{located.digest[:16]}"):
        if not _is_usable(index_path):
            ingest(located.path, index_path, located.digest, progress)
    return index_path


def prepare(
    model: ModelConfig, models_dir: Path, progress: store.Progress = store.no_progress, digest: str = ""
) -> Path:
    """As `prepare_checkpoint`, and compile the kernels into the cache. Returns the `.idx`."""
    index_path = prepare_checkpoint(model, models_dir, progress, digest)
    from stages.worker.checkpoint.warmup import compile_kernels

    compile_kernels(model, progress)
    return index_path


def _is_usable(index_path: Path) -> bool:
    """Is it there, of this version, and its `.bin` beside it whole in size?"""
    try:
        index = load_index(index_path)
        return index_path.with_suffix(".bin").stat().st_size == index.bin_bytes
    except (OSError, CheckpointError):
        return False
