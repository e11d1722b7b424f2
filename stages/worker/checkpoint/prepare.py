"""From a configured model to a checkpoint and kernels that can be used: fetch, ingest, compile.

Idempotent.  One process does the work under a file lock; others wait for it and use its result.  A model that is
prepared already costs one read of its index.
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
    """Fetch and ingest the model as far as necessary; returns its `.idx`.

    digest: SHA-256 of the file that the checkpoint must be of, if one exists already; the configured file may have
        changed since.

    Raises `StarlingError`, which says what is wrong and what to do.
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
    """As `prepare_checkpoint`; then compile the kernels of the model's KV type into the cache.

    Raises `StarlingError`, or `RuntimeError` with the compiler's last output.
    """
    index_path = prepare_checkpoint(model, models_dir, progress, digest)
    compile_kernels(model, progress)
    return index_path


def compile_kernels(model: ModelConfig, progress: store.Progress) -> None:
    """Compile the kernels that the cache lacks for the model's KV type. Raises `RuntimeError`."""
    from stages.worker.kernels import build  # imports numba: only processes that need kernels pay for it

    if not build.is_compiled(model.kv_type):
        progress("compile kernels", 0, len(build.ENTRIES))
        build.build(model.kv_type, progress=lambda name, done, total: progress("compile kernels", done, total))


def _is_usable(index_path: Path) -> bool:
    """Whether the index exists in this version's format and its `.bin` has the size that it names."""
    try:
        index = load_index(index_path)
        return index_path.with_suffix(".bin").stat().st_size == index.bin_bytes
    except (OSError, CheckpointError):
        return False
