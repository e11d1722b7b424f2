"""What survives the arena: copies of full pages in the state directory.

The arena itself outlives every process, but not a clean stop, which removes it, nor a reboot.  So
pages that more than one sequence has held, which have proven their worth, are copied while the server
runs.  All others are copied while nothing is computed, as long as the file has room without giving up another
page; and at a clean stop, the most recently used first, as far as bound and time allow.
(Copying every page at once would write tens of MB/s to the disk all day, beside the ranks.)

A copy is found again by its name; whether it is what it was, its checksum says when it is read.
"""

from __future__ import annotations

import re
from pathlib import Path

from shm.pages import NUMERICS, KvGeometry
from stages.kv.pool.page_pool import Pool
from stages.kv.storage.spill import PageStore

IN_SPILL, IN_STATE = 1, 2  # bits of a page header's `residency`
PROVEN_USES = 2
KEPT_VERSIONS = 1  # files of other versions of a model
PAGES_NAME = re.compile(r"(?P<slug>.+)-[0-9a-f]{12}-[a-z0-9]+-[0-9]+\.pages")  # as `store_path` makes it


def store_path(directory: Path, slug: str, digest: str, geometry: KvGeometry) -> Path:
    """One file for each identity: another version of a model does not overwrite this one's."""
    return directory / f"{slug}-{digest[:12]}-{geometry.kv_type}-{geometry.page_tokens}.pages"


def stores_of(directory: Path, slug: str) -> list[Path]:
    """The files of all versions of a model, the last used one last."""
    named = ((path, PAGES_NAME.fullmatch(path.name)) for path in directory.glob("*.pages"))
    found = [path for path, name in named if name is not None and name["slug"] == slug]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def remove_old(directory: Path, slug: str, mine: Path) -> list[Path]:
    """Keep one other version's file beside `mine`, for whoever goes back; remove what is older."""
    others = [path for path in stores_of(directory, slug) if path != mine]
    for path in others[:-KEPT_VERSIONS]:
        path.unlink(missing_ok=True)
    return others[:-KEPT_VERSIONS]


def identity(digest: str, geometry: KvGeometry) -> dict[str, object]:
    """What a file of pages must say of itself to be used."""
    return {"digest": digest, "numerics": NUMERICS, **geometry._asdict()}


def note_copies(pool: Pool, store: PageStore) -> None:
    """After a restart: enter into the page headers which pages `store` has."""
    for digest in store.digests():
        page = pool.index.get(digest)
        if page is not None:
            pool.headers.mark_copy(page, store.residency)


def save_proven(pool: Pool, store: PageStore, limit: int) -> int:
    """Copy at most `limit` pages that have proven themselves. Returns how many."""
    return _save(pool, store, pool.headers.without_copy(store.residency, PROVEN_USES), limit)


def save_resting(pool: Pool, store: PageStore, limit: int) -> int:
    """While no sequence runs: copy at most `limit` of all other pages into free places. Returns how many."""
    room = min(limit, store.capacity - len(store))
    if pool.leased or room <= 0:
        return 0
    pages = pool.headers.without_copy(store.residency, 1)
    return _save(pool, store, sorted(pages, key=pool.headers.last_use_ns, reverse=True), room)


def save_recent(pool: Pool, store: PageStore, limit: int) -> int:
    """Copy at most `limit` of the most recent pages, as many as fit under the bound. 0: all are there.

    A page that is there already counts as recent, so that it is not replaced by an older one.
    """
    wanted = []
    for page in pool.named_pages()[: store.capacity]:
        digest = pool.name_of(page)
        if digest is not None and digest in store:
            store.touch(digest)
        else:
            wanted.append(page)
    return _save(pool, store, wanted, limit)


def _save(pool: Pool, store: PageStore, pages: list[int], limit: int) -> int:
    count = 0
    for page in pages:
        if count == limit:
            break
        digest = pool.name_of(page)
        if digest is None:
            continue
        if not store.put(digest, pool.headers.record(page), pool.arena.pages[page]):
            break
        pool.headers.mark_copy(page, store.residency)
        count += 1
    return count
