"""The capacity check of a model that was converted after its load had begun.

Before that the size of its arenas was an estimate (pipeline/models/capacity.py), and could be much too small for a long
context or a large vocabulary.  Now it is known, and nothing of the version exists yet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.models import capacity, store
from pipeline.models.versions import ModelVersion


def is_planned(version: ModelVersion, models_dir: Path) -> bool:
    """Whether the checkpoint was here when the load began, so that its arenas were planned by their sizes."""
    return bool(version.digest) or store.find_index(version.model, models_dir) is not None


def check_memory(
    config: Config, version: ModelVersion, measure: Callable[[Config], capacity.FreeMemory] = capacity.measure
) -> None:
    """Raise `ResourceError` with the numbers unless a version that is converted by now fits."""
    if (paths.arena_dir(config) / f"{version.slug}.kv").exists():
        return  # an earlier worker of it was served, and what its arenas take is not free
    capacity.check(config, version.settings, measure(config))
