"""Whether this host, and the agent's control group, have the memory for a model and its adapters.

Reads /proc and /sys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline import cgroup, procfs
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import NotOnThisHost, ResourceError
from pipeline.models import worker_groups
from pipeline.models.capacity import adapters_need
from stages.agent.engines.interface import AdapterFile
from stages.agent.engines.local_model import LocalModel
from stages.agent.placement import Source

MEGABYTE = 1 << 20


class _Memory(NamedTuple):
    nbytes: int
    owner: str  # for messages


def _available() -> _Memory:
    return _least(procfs.available_memory(), cgroup.read().memory_free)


def _least(host: int, group: int | None) -> _Memory:
    """`group`: of the control group of the agent and its engines; None: it has no limit."""
    return _Memory(host, "this host") if group is None or host <= group else _Memory(group, "the agent's control group")


def check_memory(config: Config, entry: Source, model: ModelConfig, adapters: Iterable[AdapterFile] = ()) -> None:
    """Raise unless there is memory for a model that is started with these published adapters.

    `model`: its settings, whose adapters count as well.  `ResourceError`: another model may leave; `NotOnThisHost`:
    the host is too small.
    """
    available, owner = _available()
    if isinstance(entry, LocalModel):
        if (wanted := entry.engine.memory_mb * MEGABYTE) > available:
            raise ResourceError(
                f"{entry.name!r} may allocate {wanted:,} bytes (memory_mb of fleet.agent.engines), and {owner} "
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
    total, whole = _least(procfs.total_memory(), cgroup.read().memory)
    if needed > total:
        raise NotOnThisHost(
            f"{entry.name!r} needs {needed:,} bytes of memory ({parts}), and {whole} has {total:,} in all: lower "
            "kv_cache_mb" + (", or use smaller adapters" if added else ""),
            "model_id",
        )
    if needed > available:
        raise ResourceError(
            f"{entry.name!r} needs {needed:,} bytes of memory ({parts}), and {owner} has {available:,}: unload a "
            "model, or lower kv_cache_mb",
            "model_id",
        )


def check_adapter_memory(config: Config, model: ModelConfig, name: str, nbytes: int) -> None:
    """Raise `ResourceError` unless there is memory for an adapter of an engine that runs.

    Each worker group of the model gets it. The engine itself checks the second KV arena that it needs meanwhile.
    """
    nbytes *= worker_groups.count(config, model, model.name)
    available, owner = _available()
    if nbytes > available:
        raise ResourceError(
            f"{name!r} needs {nbytes:,} bytes of memory, and {owner} has {available:,}: unload a model",
            "model_id",
        )
