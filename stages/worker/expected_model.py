"""The model that the next version is expected to be of: a spare worker group opens and maps it before it gets one.

Each of its processes does so for itself (`open_expected`), as a mapped file that others read.  Another version costs
it the time to unmap the file again; a file that has changed since is opened as any other.  While they read its index
no version is given to them: a disk that does not answer keeps none waiting.  What cannot be read or used is logged and
not opened; a load of that model reports it to those who asked for it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.models import store, versions
from pipeline.runtime.process import open_removal_watch
from shm.checkpoint import VERSION, Checkpoint, bin_path, load_index
from stages.worker.adapters.memory import AdapterMemory
from stages.worker.checkpoint import prepare
from stages.worker.checkpoint.usable import usable_version
from stages.worker.kernels import stored_code
from stages.worker.mapped_weights import are_in_memory, can_ask, map_weights
from stages.worker.model import Model

log = logging.getLogger("starling.worker")

UNUSABLE = "no spare opens it"  # what the log says of one that is damaged
MAX_BYTES = 1 << 30  # of the weights: 2 MiB of page tables in each rank, which take 10 ms to be removed


class Expected(NamedTuple):
    """A model that may be the next one."""

    index_path: Path
    kv_type: str


class _Opened(NamedTuple):
    model: Model
    is_mapped: bool  # its weights are


_opened: _Opened | None = None  # of this process


def choose(config: Config) -> Expected | None:
    """The prepared model that was used last and is not loaded, else that which is loaded; None: there is none.

    Logs which file is damaged. Raises what a disk may cause.
    """
    folder, table = paths.models_dir(), versions.read(config)
    loaded = {one.digest or _digest(one.settings, folder) for one in table.versions}
    found: set[tuple[bool, float, Path, str]] = set()
    unusable: set[Path] = set()
    for model in (*config.models, *(one.settings for one in table.versions)) if config.performance.use_mmap else ():
        index_path = store.find_index(model, folder)
        if index_path is None and store.is_checkpoint(model, folder):
            unusable.add(store.gguf_path(model, folder))
        if index_path is not None and not model.adapters:
            is_loaded, used = index_path.stem in loaded, store.last_used(folder, index_path.stem)
            found.add((not is_loaded, used, index_path, model.kv_type))
    for path in unusable:
        usable_version(path, UNUSABLE)  # logs what is wrong with a file that is there
    # In this order, so that of many models few indexes are read.
    for _, _, index_path, kv_type in sorted(found, reverse=True):
        if usable_version(index_path, UNUSABLE) == VERSION:
            extra = stored_code.extra_entries(load_index(index_path).hyper)
            return Expected(index_path, kv_type) if stored_code.is_compiled(kv_type, extra) else None
    return None


def watch_file(expected: Expected) -> int:
    """A descriptor that is readable when the weights' file is removed: a map of it would keep its space.

    Raises `OSError`.
    """
    return open_removal_watch(bin_path(expected.index_path))


def open_expected(expected: Expected) -> None:
    """Open and map it in this process. Raises what a damaged file or a disk may cause."""
    global _opened
    checkpoint = Checkpoint(expected.index_path)
    model = Model(checkpoint)
    model.load_kernels(expected.kv_type)
    is_small = checkpoint.data.nbytes <= MAX_BYTES
    maps = is_small and can_ask(checkpoint.path, checkpoint.info.st_uid) and are_in_memory(checkpoint.data)
    if maps:
        map_weights(checkpoint.data)
    _opened = _Opened(model, maps)


def open_checkpoint(index_path: Path) -> Checkpoint:
    """The checkpoint, mapped: the expected one, if its files are the same. Raises as `Checkpoint` does."""
    global _opened
    opened = _opened
    if opened is not None:
        checkpoint = opened.model.checkpoint
        if checkpoint.index_path == index_path and _is_current(checkpoint):
            return checkpoint
        _opened = None
    return Checkpoint(index_path)


def keep_only(index_path: Path | None) -> None:
    """Close what `open_expected` has opened, unless it is this one: its file may be removed meanwhile."""
    global _opened
    if _opened is not None and _opened.model.checkpoint.index_path != index_path:
        _opened = None


def open_verified(index_path: Path, progress: store.Progress, config: Config) -> Checkpoint:
    """As `prepare.open_verified`, of the expected one if its files are the same."""
    return prepare.open_verified(index_path, progress, config.performance.use_mmap, open_checkpoint)


def model_of(checkpoint: Checkpoint, adapters: AdapterMemory | None = None) -> Model:
    """The model without copies. Raises `ModelUnavailable`."""
    if adapters is None and _is_of(checkpoint) and _opened is not None:
        return _opened.model
    return Model(checkpoint, adapters)


def is_mapped(checkpoint: Checkpoint) -> bool:
    """Whether its weights were mapped by `open_expected`."""
    return _is_of(checkpoint) and _opened is not None and _opened.is_mapped


def _is_of(checkpoint: Checkpoint) -> bool:
    return _opened is not None and _opened.model.checkpoint is checkpoint


def _is_current(checkpoint: Checkpoint) -> bool:
    """Whether both files are those that were opened, and have not been changed. Raises as `load_index` does."""
    now, then = os.stat(checkpoint.path), checkpoint.info
    return load_index(checkpoint.index_path) is checkpoint.index and all(
        getattr(now, name) == getattr(then, name)
        for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    )


def _digest(model: ModelConfig, folder: Path) -> str:
    index_path = store.find_index(model, folder)
    return index_path.stem if index_path is not None else ""
