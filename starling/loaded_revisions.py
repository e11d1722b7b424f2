"""Which revision of K and V the models that a running server has loaded are computed with, from its KV arenas.

A worker group that starts again reads the index that is there by then. If that has another revision its K and V do not
fit into the version's arena, so commands that bring an index (`starling pull`) ask for this first.
"""

from __future__ import annotations

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.observe import status
from shm.arena import ArenaError
from shm.pages import attach_kv


def read(config: Config) -> set[tuple[str, int]]:
    """Digest and `Hyper.kv_revision` of each loaded version; none if no stage of the server runs.

    Raises `PermissionError` if the server's directory belongs to another user.
    """
    if not any(record.alive for record in status.read_all(paths.run_dir(config))):
        return set()
    found = set()
    for path in sorted(paths.arena_dir(config).glob("*.kv")):
        try:
            arena, views, geometry = attach_kv(path)
        except (ArenaError, OSError):  # removed meanwhile, or of another release: no worker of this one attaches to it
            continue
        found.add((arena.digest.hex(), geometry.revision))
        del views
        arena.close()
    return found
