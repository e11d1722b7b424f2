"""The step arenas of a model with several worker groups: one table of rows, and a ring for each group.

    MODEL.steps      the rows, and the ring of group 0 (shm/step_ring.py)
    MODEL~1.steps    the ring of group 1: the same layout without rows

Any group can compute any row, and goes on where another one has stopped.  At most one ring has unacknowledged slots
that name a row, so a row's tokens have one writer at a time.  Observers of rows need the first arena alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shm.arena import Arena, ArenaError
from shm.step_ring import Steps, StepsGeometry, attach_steps, create_steps, steps_bytes

RING_FIELDS = (  # of `Steps`; the others are the table of rows
    "control",
    "slot_head",
    "entries",
    "out_token",
    "out_logprob",
    "out_top_id",
    "out_top_lp",
    "timing",
    "pool_states",
    "pooled",
)


def ring_path(steps_path: Path, ring: int) -> Path:
    """The arena of a ring, given that of the rows."""
    return steps_path.with_name(f"{steps_path.stem}~{ring}{steps_path.suffix}") if ring else steps_path


def ring_bytes(g: StepsGeometry) -> int:
    """Size of the contents of a further ring's arena in bytes."""
    return steps_bytes(_without_rows(g))


def create_rings(
    steps_path: Path, g: StepsGeometry, digest: bytes, rings: int, generation: int = 1
) -> tuple[list[Arena], list[Steps]]:
    """Create the arenas; for the scheduler. Returns them, and the views of each ring. Raises as `create_steps`."""
    arenas: list[Arena] = []
    steps: list[Steps] = []
    try:
        for ring in range(rings):
            geometry = _without_rows(g) if ring else g
            arena, views = create_steps(ring_path(steps_path, ring), geometry, digest, generation)
            arenas.append(arena)
            steps.append(join(steps[0], views) if ring else views)
    except ArenaError:
        for arena in arenas:
            arena.close()
            arena.unlink()
        raise
    return arenas, steps


def attach_ring(steps_path: Path, ring: int, digest: bytes) -> tuple[Sequence[Arena], Steps, StepsGeometry]:
    """Attach to the rows and a ring; for ranks. Raises as `attach_steps`."""
    arena, steps, g = attach_steps(steps_path, digest)
    if not ring:
        return (arena,), steps, g
    try:
        path = ring_path(steps_path, ring)
        own, views, found = attach_steps(path, digest)
        if found != _without_rows(g):
            own.close()
            raise ArenaError(f"{path}: its ring is not one of the rows in {steps_path}")
    except BaseException:
        arena.close()
        raise
    return (arena, own), join(steps, views), g


def join(rows: Steps, ring: Steps) -> Steps:
    """The rows of one, and the ring of the other."""
    return rows._replace(**{name: getattr(ring, name) for name in RING_FIELDS})


def _without_rows(g: StepsGeometry) -> StepsGeometry:
    return g._replace(max_rows=0)
