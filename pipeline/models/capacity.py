"""Capacity check: whether the machine has memory for another model version, before any part of it starts.

check        its arenas, its adapters, and weights that are read into memory
check_plan   its mapped weights too: a load on demand must fit beside those of the loaded models

The arenas of a model that is not converted yet are estimated.  `starling up` converts first; a worker that has
converted its model checks again before it loads it (stages/worker/memory_check.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pipeline import cgroup, procfs
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ResourceError
from pipeline.models import arena_sizes, store, weight_copies, worker_groups
from shm.arena import unreserved_bytes
from shm.checkpoint import CheckpointError, load_index

PEFT_WEIGHTS = "adapter_model.safetensors"  # of an adapter's directory
UNPREPARED_MB = 64  # of step and activation arenas, assumed for a model whose checkpoint does not exist yet


class FreeMemory(NamedTuple):
    """Bytes."""

    arenas: int  # free in the file system of the arenas
    memory: int  # available in the machine, and below the limit of its control group
    limit: int | None = None  # of the control group, if that leaves less than the machine has

    @property
    def owner(self) -> str:
        """What `memory` is bounded by, for messages."""
        return "the machine" if self.limit is None else f"the control group (limit: {self.limit:,} bytes)"


class MemoryPlan(NamedTuple):
    """What a version takes, in bytes. Mapped weights are pages of a file, which all versions of it share."""

    weights: int
    kv: int
    steps_and_activations: int
    adapters: int = 0
    copies: int = 0  # of the weights, one on each memory node, where these must be: the file's pages can be dropped

    @property
    def arenas(self) -> int:
        """Bytes in the file system of the arenas."""
        return self.kv + self.steps_and_activations


def measure(config: Config) -> FreeMemory:
    """What is free now. Arenas on a tmpfs use the machine's memory as well."""
    directory = paths.arena_dir(config)
    promised = unreserved_bytes(directory)  # to arenas that grow
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    found = os.statvfs(directory)
    group = cgroup.read()
    memory, limit = procfs.available_memory(), None
    if group.memory_free is not None and group.memory_free < memory:
        memory, limit = group.memory_free, group.memory
    copies = weight_copies.totals(paths.run_dir(config)).promised
    arenas = max(0, found.f_bavail * found.f_frsize - promised)
    return FreeMemory(arenas, max(0, memory - promised - copies), limit)


def plan(config: Config, model: ModelConfig) -> MemoryPlan:
    """What a version of `model` takes; an estimate if it is not prepared."""
    models_dir = paths.models_dir()
    groups = worker_groups.count(config, model, model.name)
    memories = 1 if config.performance.use_mmap else groups  # of weights
    adapters = groups * adapters_need(model)
    try:
        index_path = store.find_index(model, models_dir)
        if index_path is not None:
            index = load_index(index_path)
            sizes = arena_sizes.arena_sizes(config, model, index.hyper)
            others = sizes.steps + sizes.activations
            copies = copies_need(config, model, index.bin_bytes)
            return MemoryPlan(memories * index.bin_bytes, sizes.kv, others, adapters, copies)
    except (OSError, CheckpointError):
        pass  # it will be prepared again
    try:
        weights = store.gguf_path(model, models_dir).stat().st_size
    except OSError:
        weights = 0
    copies = copies_need(config, model, weights)
    return MemoryPlan(memories * weights, config.kv_cache_bytes(model), groups * UNPREPARED_MB << 20, adapters, copies)


def need(config: Config, model: ModelConfig) -> int:
    """Bytes of arenas that a version of `model` uses."""
    return plan(config, model).arenas


def weights_need(config: Config, model: ModelConfig) -> int:
    """Bytes of memory that a version's weights take. The pages of a mapped file do not count: they can be dropped."""
    if config.performance.use_mmap:
        return 0
    models_dir = paths.models_dir()
    index_path = store.find_index(model, models_dir)
    try:
        source = store.gguf_path(model, models_dir)
        weights = load_index(index_path).bin_bytes if index_path is not None else source.stat().st_size
        return weights * worker_groups.count(config, model, model.name)
    except (OSError, CheckpointError):  # it will be fetched, or ingested again: the worker checks again
        return 0


def copies_need(config: Config, model: ModelConfig, bin_bytes: int) -> int:
    """Bytes of the copies of a version's weights that it does not start without; `auto` makes none without room."""
    if config.performance.weight_copies != "always":
        return 0
    return arena_sizes.n_weight_copies(config, model) * bin_bytes


def adapters_need(model: ModelConfig) -> int:
    """Bytes of memory for the adapters of a worker group: as many as their files have; none if they are missing.

    The worker group that loads them refuses more than `adapters_mb` (stages/worker/checkpoint/prepare.py).
    """
    return min(sum(_adapter_bytes(expand_user(one.path)) for one in model.adapters), model.adapters_mb << 20)


def _adapter_bytes(path: Path) -> int:
    try:
        return (path / PEFT_WEIGHTS if path.is_dir() else path).stat().st_size
    except OSError:
        return 0


def check(config: Config, model: ModelConfig, free: FreeMemory, groups: int = 1) -> None:
    """Raise `ResourceError` with the numbers unless the version fits.

    groups: of so many worker groups, which may have taken their memory by now, the part of one is checked, beside the
    arenas.
    """
    wanted = plan(config, model)
    wanted = wanted._replace(adapters=wanted.adapters // groups, copies=wanted.copies // groups)
    needed, adapters, weights = wanted.arenas, wanted.adapters, weights_need(config, model) // groups
    if needed <= free.arenas and needed + adapters + wanted.copies > free.memory and wanted.copies:
        raise ResourceError(
            f"model {model.name!r} needs {wanted.copies:,} bytes for a copy of its weights on each memory node and "
            f"{needed + adapters:,} for its arenas and adapters in addition to the loaded models, and {free.owner} has "
            f"{free.memory:,} available: set performance.weight_copies: auto, or unload a model first",
            param="performance.weight_copies",
        )
    if needed <= free.arenas and needed + adapters + weights > free.memory and weights:
        raise ResourceError(
            f"model {model.name!r} needs {weights:,} bytes for its weights and {needed + adapters:,} for its arenas "
            f"and adapters in addition to the loaded models, and {free.owner} has {free.memory:,} available: set "
            f"performance.use_mmap: true, lower kv_cache_mb, or unload a model first",
            param="performance.use_mmap",
        )
    if needed <= free.arenas and needed <= free.memory < needed + adapters:
        raise ResourceError(
            f"model {model.name!r} needs {adapters:,} bytes for its adapters and {needed:,} for its arenas in addition "
            f"to the loaded models, and {free.owner} has {free.memory:,} available: use fewer adapters or some of a "
            f"smaller rank, lower kv_cache_mb, or unload a model first",
            param="models.adapters",
        )
    available = min(free.arenas, free.memory)
    if needed <= available:
        return
    where = f"{paths.arena_dir(config).parent} has" if free.arenas <= free.memory else f"{free.owner} has"
    raise ResourceError(
        f"model {model.name!r} needs {needed:,} bytes for its arenas ({config.kv_cache_bytes(model):,} of KV pages) in "
        f"addition to the loaded models, and {where} {available:,} free: lower kv_cache_mb or max_sequence_length, or "
        f"unload a model first",
        param="kv_cache_mb",
    )


def check_plan(config: Config, name: str, wanted: MemoryPlan, free: FreeMemory, mapped: int) -> None:
    """Raise `ResourceError` with the numbers unless a version fits.

    mapped: bytes of available memory that the mapped weights of other loaded models use.
    """
    weights = wanted.copies or wanted.weights
    needed = wanted.arenas + weights + wanted.adapters
    left = max(0, free.memory - mapped)
    if wanted.arenas <= free.arenas and needed <= left:
        return
    place = paths.arena_dir(config).parent
    where = f"{place} has {free.arenas:,} bytes free"
    if wanted.arenas <= free.arenas:
        where = f"{free.owner} has {left:,} bytes available beside the weights of the loaded models"
    raise ResourceError(
        f"model {name!r} needs {needed:,} bytes ({weights:,} of weights, {wanted.kv:,} of KV pages, "
        f"{wanted.steps_and_activations:,} of other arenas and {wanted.adapters:,} of adapters), and {where}: lower "
        f"kv_cache_mb, or unload a model first",
        param="model",
    )
