"""Sizes of a model's arenas, for file systems with room for so many versions of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pipeline.config.load import resolve
from pipeline.models.arena_sizes import ArenaSizes, arena_sizes
from stages.worker.checkpoint.ingest import ingest


def arenas_of(config: dict[str, Any], path: Path, home: Path) -> ArenaSizes:
    """The arenas of one version of the first model, whose file is `path`."""
    resolved = resolve(config, {})
    index = ingest(path, home / "sized.idx", hashlib.sha256(path.read_bytes()).hexdigest())
    return arena_sizes(resolved, resolved.models[0], index.hyper)
