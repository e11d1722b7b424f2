"""Compile the kernels of a model before it is served, with progress; nothing to do when they are cached."""

from __future__ import annotations

from pipeline.config.schema import ModelConfig
from pipeline.models.store import Progress
from stages.worker.kernels import build


def compile_kernels(model: ModelConfig, progress: Progress) -> None:
    """Fill the cache for the model's KV type. Raises `RuntimeError` with the compiler's last words."""
    if not build.is_compiled(model.kv_type):
        progress("compile kernels", 0, len(build.ENTRIES))
        build.build(model.kv_type, progress=lambda name, done, total: progress("compile kernels", done, total))
