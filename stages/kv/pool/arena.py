"""A model's KV arena: adopted after a restart, or created under its byte bound.

An existing arena is used only if every field of its header matches.  The page table is then rebuilt from the page
headers: a full page with an intact header is cached; a leased page is unclaimed until the scheduler names its leases;
a page with a torn header is unclaimed too, because a sequence may hold it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from pipeline.config import server_cores
from shm import memory_nodes
from shm.arena import Arena, ArenaError
from shm.pages import (
    PAGE_FREE,
    PAGE_FULL,
    KvArena,
    KvGeometry,
    attach_kv,
    create_kv,
    pages_that_fit,
    unpack_ordinal,
)
from stages.kv.pool.extents import Extents
from stages.kv.pool.page_headers import PageHeaders, PageIdentity

log = logging.getLogger("starling.kv")


class AdoptedPages(NamedTuple):
    """The pages of an adopted arena by their headers."""

    full: list[tuple[int, PageIdentity]]  # the next page to evict first
    unclaimed: list[int]
    n_torn: int  # full pages with a damaged header; they are in `unclaimed`


class OpenedArena(NamedTuple):
    """A mapped KV arena."""

    arena: Arena
    views: KvArena
    memory: Extents
    adopted: AdoptedPages | None  # None: the arena is new


def open_arena(
    path: Path,
    geometry: KvGeometry,
    digest: bytes,
    budget_bytes: int,
    new_generation: int,
    cpus: Collection[int] | None = None,
) -> OpenedArena:
    """Adopt the arena at `path` or replace it. `digest`: raw SHA-256 of the model.

    cpus: those that read and write its pages, beside whose memory nodes they are placed; None: those of this process.
    Raises `ArenaError`, with the numbers, when the budget is below the pages of one place, when the file system is too
    small, and when another running process writes to the arena.
    """
    geometry.check()
    n_pages, node_cpus = pages_that_fit(geometry, budget_bytes), _node_cpus(cpus)
    n_groups = geometry.groups.n_groups
    if n_pages < n_groups:
        raise ArenaError(
            f"{path}: kv_cache_mb allows {budget_bytes:,} bytes, and {geometry.page_tokens} tokens take {n_groups} "
            f"page{'s' * (n_groups > 1)} of {geometry.page_bytes:,}; raise it or make page_tokens smaller"
        )
    mismatch = _mismatch(path, geometry, digest, n_pages)
    if not mismatch:
        arena, views, _ = attach_kv(path, digest, own=True)
        memory = Extents(arena, geometry, n_pages, node_cpus=node_cpus)
        return OpenedArena(arena, views, memory, scan(PageHeaders(views.headers), memory.n_pages))
    if path.exists():
        log.warning("the existing KV arena is replaced", extra={"reason": str(mismatch)})
        path.unlink()  # first: there may not be room for both
    arena, views = create_kv(path, geometry, n_pages, digest, new_generation, grows=True)
    return OpenedArena(arena, views, Extents(arena, geometry, n_pages, node_cpus=node_cpus), None)


def _node_cpus(cpus: Collection[int] | None) -> list[list[int]]:
    """The CPUs beside each memory node that pages are placed on; [] where there is one node to choose from."""
    own = server_cores.own()
    if len(memory_nodes.of([*own, *(cpus or ())])) < 2:
        return []
    return memory_nodes.of(cpus or own)


def _mismatch(path: Path, geometry: KvGeometry, digest: bytes, n_pages: int) -> str:
    """Why the arena at `path` cannot be adopted; "" when it can."""
    try:
        arena, views, found = attach_kv(path, digest)
    except (ArenaError, OSError) as error:
        return str(error)
    arena.close()
    if found != geometry:
        return f"its geometry is {found}, not {geometry}"
    if len(views.pages) != n_pages:
        return f"it has {len(views.pages)} pages, not {n_pages}"
    return ""


def scan(headers: PageHeaders, n_pages: int) -> AdoptedPages:
    """Sort the first `n_pages` of an adopted arena, those that have memory, by their headers."""
    full: list[tuple[int, PageIdentity]] = []
    unclaimed: list[int] = []
    n_torn = 0
    for page in range(n_pages):
        state = headers.state(page)
        if state == PAGE_FREE:
            continue
        identity = headers.identity(page) if state == PAGE_FULL else None
        if identity is None:
            unclaimed.append(page)
            n_torn += state == PAGE_FULL
        else:
            full.append((page, identity))
    # The predecessor's order of eviction: longest unused first, and the end of a prefix before its start.
    full.sort(key=lambda entry: (-headers.last_use_ns(entry[0]), *unpack_ordinal(entry[1].ordinal)), reverse=True)
    return AdoptedPages(full, unclaimed, n_torn)
