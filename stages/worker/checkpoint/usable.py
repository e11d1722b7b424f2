"""Whether a checkpoint in the directory of models can be used as it is, of this or of an older version."""

from __future__ import annotations

import logging
from pathlib import Path

from shm.checkpoint import VERSION, CheckpointError, load_index

log = logging.getLogger("starling.checkpoint")


def is_usable(index_path: Path) -> bool:
    """Whether there is a checkpoint of the current version."""
    return usable_version(index_path) == VERSION


def usable_version(index_path: Path, effect: str = "it is made again") -> int:
    """Version of an index whose `.bin` has the size that it names; 0 when there is none that can be used.

    effect: what is logged, with the reason, of one that cannot be.
    """
    try:
        index = load_index(index_path)
        is_complete = index_path.with_suffix(".bin").stat().st_size == index.bin_bytes
        if not index.is_current:
            log.info("checkpoint is of an older release, ingesting again", extra={"path": str(index_path)})
            return 0
    except FileNotFoundError:
        return 0
    except (OSError, CheckpointError) as error:
        log.warning("checkpoint cannot be used", extra={"effect": effect, "reason": str(error)})
        return 0
    return index.version if is_complete else 0
