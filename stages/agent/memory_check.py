"""Whether this host has the memory for a model and its adapters. Reads /proc."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline import procfs
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ModelUnavailable, ResourceError
from pipeline.models import worker_groups
from pipeline.models.capacity import adapters_need
from stages.agent.engines.interface import AdapterFile
from stages.agent.engines.local_model import LocalModel
from stages.agent.placement import Source

MEGABYTE = 1 << 20


def check_memory(config: Config, entry: Source, model: ModelConfig, adapters: Iterable[AdapterFile] = ()) -> None:
    """Raise unless the host has memory for a model that is started with these published adapters.

    `model`: its settings, whose adapters count as well.  `ResourceError`: another model may leave; `ModelUnavailable`:
    the host is too small.
    """
    available, total = procfs.available_memory(), procfs.total_memory()
    if isinstance(entry, LocalModel):
        if (wanted := entry.engine.memory_mb * MEGABYTE) > available:
            raise ResourceError(
                f"{entry.name!r} may allocate {wanted:,} bytes (memory_mb of fleet.agent.engines), and this host "
                f"has {available:,}: unload a model, or lower memory_mb",
                "model_id",
            )
        return
    groups = worker_groups.count(config, model, model.name)
    arenas = config.kv_cache_bytes(model)
    weights = 0 if config.performance.use_mmap else groups * entry.weights_bytes
    added = groups * (adapters_need(model) + sum(one.nbytes for one in adapters))
    needed = arenas + weights + added
    parts = f"{arenas:,} of KV pages" + (f", {added:,} of adapters" if added else "")
    if needed > total:
        raise ModelUnavailable(
            f"{entry.name!r} needs {needed:,} bytes of memory ({parts}), and this host has {total:,} in all: lower "
            "kv_cache_mb" + (", or use smaller adapters" if added else ""),
            "model_id",
        )
    if needed > available:
        raise ResourceError(
            f"{entry.name!r} needs {needed:,} bytes of memory ({parts}), and this host has {available:,}: unload a "
            "model, or lower kv_cache_mb",
            "model_id",
        )


def check_adapter_memory(config: Config, model: ModelConfig, name: str, nbytes: int) -> None:
    """Raise `ResourceError` unless the host has memory for an adapter of an engine that runs.

    Each worker group of the model gets it. The engine itself checks the second KV arena that it needs meanwhile.
    """
    nbytes *= worker_groups.count(config, model, model.name)
    if nbytes > (available := procfs.available_memory()):
        raise ResourceError(
            f"{name!r} needs {nbytes:,} bytes of memory, and this host has {available:,}: unload a model",
            "model_id",
        )
