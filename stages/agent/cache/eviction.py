"""Which models are evicted for a new one. Pure: least recently used first, pinned ones never."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.errors import ResourceError


class Item(NamedTuple):
    """A model, or an unfinished download."""

    key: str
    nbytes: int
    used: float  # time of the last use
    is_pinned: bool


class Bounds(NamedTuple):
    """Bytes."""

    most: int  # of all models together; 0: no bound
    floor: int  # that stay free on the disk


def plan_eviction(items: Iterable[Item], need: int, more_disk: int, free: int, bounds: Bounds) -> list[str]:
    """The keys to evict, so that `need` more bytes of models fit.

    more_disk: bytes that the disk has yet to provide of them; free: bytes that are free on the disk.
    Raises `ResourceError` with the numbers when they cannot fit; then nothing should be evicted.
    """
    items = list(items)
    total = sum(item.nbytes for item in items)
    above_most = total + need - bounds.most if bounds.most else 0
    below_floor = bounds.floor + more_disk - free
    excess = max(0, above_most, below_floor)
    chosen, freed = [], 0
    for item in sorted((one for one in items if not one.is_pinned), key=lambda one: (one.used, one.key)):
        if freed >= excess:
            break
        chosen.append(item.key)
        freed += item.nbytes
    if freed >= excess:
        return chosen
    pinned = sum(item.nbytes for item in items if item.is_pinned)
    if above_most >= below_floor:
        raise ResourceError(
            f"fleet.cache_mb allows {bounds.most:,} bytes of models, {need:,} more are needed, and {pinned:,} of "
            f"{total:,} are in use: raise it, or remove a model from the configuration",
            "fleet.cache_mb",
        )
    raise ResourceError(
        f"the disk has {free:,} bytes free, of which fleet.free_mb keeps {bounds.floor:,}; {more_disk:,} are needed, "
        f"and eviction would free {freed:,}: free space there, or move STARLING_HOME",
        "fleet.free_mb",
    )
