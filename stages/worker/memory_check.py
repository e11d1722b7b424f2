"""The capacity check of a model that was converted after its load had begun, and the memory that weight copies find.

Before the conversion the size of its arenas was an estimate (pipeline/models/capacity.py), and could be much too small
for a long context or a large vocabulary.  Now it is known, and nothing of the version exists yet.
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.models import capacity, store, worker_groups
from pipeline.models.versions import ModelVersion


def is_planned(version: ModelVersion, models_dir: Path) -> bool:
    """Whether the checkpoint was here when the load began, so that its arenas were planned by their sizes."""
    return bool(version.digest) or store.find_index(version.model, models_dir) is not None


def check_memory(
    config: Config, version: ModelVersion, measure: Callable[[Config], capacity.FreeMemory] = capacity.measure
) -> None:
    """Raise `ResourceError` with the numbers unless a worker group of a version that is converted by now fits."""
    free = measure(config)
    # Looked for afterwards: kv may create the largest one now that the version is converted, or an earlier worker of
    # it was served.  What they take is not free.
    if not _has_arenas(config, version):
        groups = worker_groups.count(config, version.settings, version.name)
        capacity.check(config, version.settings, free, groups)


def memory_left(
    config: Config, version: ModelVersion, measure: Callable[[Config], capacity.FreeMemory] = capacity.measure
) -> int:
    """Bytes of memory that are available beside the arenas of a version that is converted."""
    arenas = 0 if _has_arenas(config, version) else capacity.need(config, version.settings)
    return max(0, measure(config).memory - arenas)


def _has_arenas(config: Config, version: ModelVersion) -> bool:
    """Whether its largest arena exists, or is being created. What that has yet to reserve does not count as free."""
    folder, name = paths.arena_dir(config), f"{version.slug}.kv"
    # In this order: one that is being created is renamed.
    return any(folder.glob(f".{glob.escape(name)}.*")) or (folder / name).exists()
