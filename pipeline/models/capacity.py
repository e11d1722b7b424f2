"""Is there memory for one more version of a model? Asked before anything of it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ResourceError

ARENA_SPARE_MB = 64  # beside a KV arena: steps and activations


class FreeMemory(NamedTuple):
    """Bytes."""

    arenas: int  # free where the arenas are
    memory: int  # that the machine can still give


def measure(config: Config) -> FreeMemory:
    """What there is now. Arenas on a tmpfs take the machine's memory as well."""
    directory = paths.arena_dir(config)
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return FreeMemory(_free(directory), procfs.available_memory())


def _free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def need(config: Config, model: ModelConfig) -> int:
    """Bytes of arenas that a version of `model` takes."""
    return config.kv_cache_bytes(model) + (ARENA_SPARE_MB << 20)


def check(config: Config, model: ModelConfig, free: FreeMemory) -> None:
    """Raises `ResourceError` with the numbers."""
    needed = need(config, model)
    have = min(free)
    if needed <= have:
        return
    where = f"{paths.arena_dir(config).parent} has" if free.arenas <= free.memory else "the machine has"
    raise ResourceError(
        f"model {model.name!r} beside what is loaded needs {needed:,} bytes for its arenas "
        f"({config.kv_cache_bytes(model):,} of KV pages), and {where} {have:,} free: lower kv_cache_mb, or unload "
        f"a model first",
        param="kv_cache_mb",
    )
