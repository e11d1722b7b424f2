"""Which revision of K and V the models that a running server has loaded are computed with, from its KV arenas.

A worker group that starts again reads the index that is there by then. If that has another revision its K and V do not
fit into the version's arena, so commands that bring an index (`starling pull`) ask for this first.  The engines of the
agents of this home use its checkpoints, too.  Servers of this home with another `server.run_dir` are not found.
"""

from __future__ import annotations

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.observe import status
from shm.arena import ArenaError
from shm.pages import attach_kv


def read(config: Config) -> set[tuple[str, int]]:
    """Digest and `Hyper.kv_revision` of each version that the server or an engine of an agent has loaded.

    Raises `PermissionError` if the server's directory belongs to another user.
    """
    found = _read(config)
    for run_dir in (paths.home() / "engines").glob("*"):  # stages/agent/engines/starling_engine.py
        server = msgspec.structs.replace(config.server, run_dir=str(run_dir))
        found |= _read(msgspec.structs.replace(config, server=server))
    return found


def _read(config: Config) -> set[tuple[str, int]]:
    """Those of one server; none if no stage of it runs."""
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
