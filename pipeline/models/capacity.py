"""Capacity check: whether the machine has memory for another model version, before any part of it starts."""

from __future__ import annotations

import os
from typing import NamedTuple

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ResourceError
from pipeline.models import arena_sizes, store
from shm.checkpoint import CheckpointError, load_index

UNPREPARED_MB = 64  # of step and activation arenas, assumed for a model whose checkpoint does not exist yet


class FreeMemory(NamedTuple):
    """Bytes."""

    arenas: int  # free in the file system of the arenas
    memory: int  # available in the machine


def measure(config: Config) -> FreeMemory:
    """What is free now. Arenas on a tmpfs use the machine's memory as well."""
    directory = paths.arena_dir(config)
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    found = os.statvfs(directory)
    return FreeMemory(found.f_bavail * found.f_frsize, procfs.available_memory())


def need(config: Config, model: ModelConfig) -> int:
    """Bytes of arenas that a version of `model` uses."""
    try:
        index = store.find_index(model, paths.models_dir())
        if index is not None:
            return arena_sizes.arena_sizes(config, model, load_index(index).hyper).total
    except (OSError, CheckpointError):
        pass  # it will be prepared again
    return config.kv_cache_bytes(model) + (UNPREPARED_MB << 20)


def weights_need(config: Config, model: ModelConfig) -> int:
    """Bytes of memory that a version's weights take. The pages of a mapped file do not count: they can be dropped."""
    if config.performance.use_mmap:
        return 0
    models_dir = paths.models_dir()
    index_path = store.find_index(model, models_dir)
    try:
        source = store.gguf_path(model, models_dir)
        return load_index(index_path).bin_bytes if index_path is not None else source.stat().st_size
    except (OSError, CheckpointError):  # it will be fetched, or ingested again: the worker checks again
        return 0


def check(config: Config, model: ModelConfig, free: FreeMemory) -> None:
    """Raise `ResourceError` with the numbers unless the version fits."""
    needed, weights = need(config, model), weights_need(config, model)
    if needed <= free.arenas and needed + weights > free.memory and weights:
        raise ResourceError(
            f"model {model.name!r} needs {weights:,} bytes for its weights and {needed:,} for its arenas in addition "
            f"to the loaded models, and the machine has {free.memory:,} available: set performance.use_mmap: true, "
            f"lower kv_cache_mb, or unload a model first",
            param="performance.use_mmap",
        )
    available = min(free)
    if needed <= available:
        return
    where = f"{paths.arena_dir(config).parent} has" if free.arenas <= free.memory else "the machine has"
    raise ResourceError(
        f"model {model.name!r} needs {needed:,} bytes for its arenas ({config.kv_cache_bytes(model):,} of KV pages) in "
        f"addition to the loaded models, and {where} {available:,} free: lower kv_cache_mb, or unload a model first",
        param="kv_cache_mb",
    )
