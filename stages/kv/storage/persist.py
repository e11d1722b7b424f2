"""Which full pages are copied to the state directory, and when.

The arena outlives every process, but neither a clean stop, which removes it, nor a reboot.

    while the server runs     pages that at least two sequences have held
    while no sequence runs    all others, as long as the file has free cells
    at a clean stop           the most recently used ones, within the bound

Copying every page at once would write tens of MB/s to the disk all the time, beside the ranks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from shm.pages import NUMERICS, KvGeometry
from stages.kv.pool.page_pool import PagePool
from stages.kv.storage.threaded_store import ThreadedPageStore

IN_SPILL, IN_STATE = 1, 2  # bits of a page header's `residency`
PROVEN_USES = 2  # sequences that have held a page worth saving at once
# A copy is replaced by one of a page in memory only after it was unused for so long: otherwise, with more pages in use
# than the file holds, each of them would be written again whenever it was used.
REPLACED_AFTER_NS = 600 * 10**9
KEPT_VERSIONS = 1  # files of other versions of a model
# As `store_path` makes it.
PAGE_FILE_NAME = re.compile(r"(?P<slug>.+)-[0-9a-f]{12}-[a-z0-9]+-[0-9]+\.pages")


def store_path(directory: Path, slug: str, digest: str, geometry: KvGeometry) -> Path:
    """One file for each identity, so that versions of a model do not overwrite each other's pages."""
    return directory / f"{slug}-{digest[:12]}-{geometry.kv_type}-{geometry.page_tokens}.pages"


def page_files(directory: Path, slug: str) -> list[Path]:
    """The files of all versions of a model, the most recently used one last."""
    names = ((path, PAGE_FILE_NAME.fullmatch(path.name)) for path in directory.glob("*.pages"))
    found = [path for path, name in names if name is not None and name["slug"] == slug]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def remove_old_versions(directory: Path, slug: str, current: Path) -> list[Path]:
    """Remove all files of other versions except the latest one, to which the model may return.

    Returns the files removed. A file that cannot be removed stays; a later start tries again.
    """
    others = [path for path in page_files(directory, slug) if path != current]
    removed = []
    for path in others[:-KEPT_VERSIONS]:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def file_identity(digest: str, geometry: KvGeometry) -> dict[str, object]:
    """The identity that a page file must have to be used."""
    return {"digest": digest, "numerics": NUMERICS, **geometry.as_meta()}


def mark_copies(pool: PagePool, store: ThreadedPageStore) -> None:
    """After a restart: note in the page headers which pages `store` contains."""
    for page_hash in store.hashes():
        page = pool.table.get_cached_page(page_hash)
        if page is not None:
            pool.headers.mark_saved(page, store.residency)


def save_proven(pool: PagePool, store: ThreadedPageStore, limit: int) -> int:
    """Save at most `limit` pages that several sequences have held. Returns the number saved.

    In a full file those that were used in the last `REPLACED_AFTER_NS` replace copies that were not.
    """
    pages, room = pool.headers.without_copy(store.residency, PROVEN_USES), store.room
    if pages and room < limit:
        before_ns = pool.clock_ns() - REPLACED_AFTER_NS
        n_idle = len(store.idle(before_ns))
        n_recent = sum(pool.headers.last_use_ns(page) >= before_ns for page in pages) if n_idle else 0
        room = max(room, min(n_recent, room + n_idle))
    return _save_last_used(pool, store, pages, min(limit, room))


def save_idle(pool: PagePool, store: ThreadedPageStore, limit: int) -> int:
    """While no sequence runs: save at most `limit` other pages into free cells. Returns the number saved."""
    if pool.leased:
        return 0
    return _save_last_used(pool, store, pool.headers.without_copy(store.residency, 1), min(limit, store.room))


def save_recent(pool: PagePool, store: ThreadedPageStore, limit: int) -> int:
    """Save at most `limit` of the most recently used pages that fit under the bound. Returns the number saved.

    A recent page that is saved already is touched, so that no older one replaces it.
    """
    wanted = []
    for page in pool.table.full_pages()[: store.capacity]:
        page_hash = pool.table.hash_of(page)
        if page_hash is not None and page_hash in store:
            store.touch(page_hash)
        else:
            wanted.append(page)
    return _save(pool, store, wanted, limit)


def note_uses(pool: PagePool, stores: Sequence[ThreadedPageStore]) -> None:
    """Count the uses of pages in memory for their copies as well: what is used there is not replaced on the disk.

    Their records tell the next start which pages to warm.
    """
    last_use_ns = pool.headers.last_use_ns
    # Of pages that were used together the first ones of a prefix come last: they are to be replaced last.
    unnoted = sorted(pool.headers.take_unnoted(), key=lambda one: (last_use_ns(one[0]), -one[0]))
    uses = [
        (page_hash, count, last_use_ns(page))
        for page, count in unnoted
        if (page_hash := pool.table.hash_of(page)) is not None
    ]
    for store in stores:
        if uses:
            store.add_uses(uses)


def _save_last_used(pool: PagePool, store: ThreadedPageStore, pages: list[int], limit: int) -> int:
    """Save at most `limit` of `pages`, the most recently used ones first. Returns the number saved."""
    if limit <= 0:
        return 0
    return _save(pool, store, sorted(pages, key=pool.headers.last_use_ns, reverse=True), limit)


def _save(pool: PagePool, store: ThreadedPageStore, pages: list[int], limit: int) -> int:
    count = 0
    for page in pages:
        if count == limit:
            break
        page_hash = pool.table.hash_of(page)
        if page_hash is None:
            continue
        if not store.save(page_hash, pool.headers.record(page), pool.arena.pages[page]):
            break
        pool.headers.mark_saved(page, store.residency)
        count += 1
    return count
