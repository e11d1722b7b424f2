"""A model's KV arena: found again after a restart, or made anew under its byte bound.

What a predecessor left is used only if every field of its header fits.  The index is rebuilt from
the page headers: full ones with a sound header are cache, leased ones are in limbo until the
scheduler has declared what it holds, torn ones are in limbo too, since somebody may hold them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from shm.arena import Arena, ArenaError
from shm.pages import (
    PAGE_FREE,
    PAGE_FULL,
    KvArena,
    KvGeometry,
    attach_kv,
    create_kv,
    pages_that_fit,
)
from stages.kv.pool.headers import Headers, PageName

log = logging.getLogger("starling.kv")


class Found(NamedTuple):
    """What the headers of an adopted arena say."""

    full: list[tuple[int, PageName]]  # the page to be evicted first in front
    limbo: list[int]
    torn: int  # full pages whose header is damaged; they are in `limbo`


class Home(NamedTuple):
    arena: Arena
    views: KvArena
    found: Found | None  # None: the arena is new


def open_arena(path: Path, geometry: KvGeometry, digest: bytes, budget_bytes: int, new_generation: int) -> Home:
    """Adopt the arena at `path` or replace it. `digest`: raw SHA-256 of the model.

    Raises `ArenaError`, with the numbers, when not even one page is allowed or the file system is
    too small, and when another living process writes to it.
    """
    geometry.check()
    n_pages = pages_that_fit(geometry, budget_bytes)
    if n_pages < 1:
        raise ArenaError(
            f"{path}: kv_cache_mb allows {budget_bytes:,} bytes, and one page of {geometry.page_tokens} "
            f"tokens has {geometry.page_bytes:,}; raise it or make page_tokens smaller"
        )
    reason = _why_not(path, geometry, digest, n_pages)
    if not reason:
        arena, views, _ = attach_kv(path, digest, own=True)
        return Home(arena, views, scan(Headers(views.headers), n_pages))
    if path.exists():
        log.warning("the KV arena of an earlier start is not used: %s", reason)
        path.unlink()  # first: there may not be room for both
    arena, views = create_kv(path, geometry, n_pages, digest, new_generation)
    return Home(arena, views, None)


def _why_not(path: Path, geometry: KvGeometry, digest: bytes, n_pages: int) -> str:
    """Why the arena at `path` is not the one that is wanted; "" when it is."""
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


def scan(headers: Headers, n_pages: int) -> Found:
    """Sort the pages of an adopted arena by what their headers say."""
    full: list[tuple[int, PageName]] = []
    limbo: list[int] = []
    torn = 0
    for page in range(n_pages):
        state = headers.state(page)
        if state == PAGE_FREE:
            continue
        name = headers.name(page) if state == PAGE_FULL else None
        if name is None:
            limbo.append(page)
            torn += state == PAGE_FULL
        else:
            full.append((page, name))
    # As the predecessor would have evicted them: longest unused first, of a prefix the end first.
    full.sort(key=lambda entry: (headers.last_use_ns(entry[0]), -entry[1].ordinal))
    return Found(full, limbo, torn)
