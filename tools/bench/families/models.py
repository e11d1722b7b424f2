"""The random models of shapes.py as files, written to the cache at their first use."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import ModelConfig
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.families.shapes import shape_of
from tools.tiny_gguf import write_model


def file_of(family: str, recipe: str, layers: int) -> Path:
    """The GGUF file of a family."""
    gguf = paths.cache_dir() / "bench" / f"family-{family}-{layers}-{recipe}.gguf"
    if not gguf.exists():
        gguf.parent.mkdir(parents=True, exist_ok=True)
        write_model(gguf.with_suffix(".part"), shape_of(family, layers), recipe).rename(gguf)
    return gguf


def index_of(gguf: Path) -> Path:
    """The index of the prepared checkpoint of a file."""
    return prepare_checkpoint(ModelConfig(name=gguf.stem, path=str(gguf)), paths.models_dir())
